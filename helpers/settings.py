"""Settings of one job: choose a profile, override some of its values, and see the batch arithmetic."""

import dataclasses
import difflib
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Profiles = Mapping[str, Mapping[str, Any]]

REQUIRED = ("hardware", "gpus", "micro_batch", "accumulation")


@dataclasses.dataclass(frozen=True, repr=False)
class Settings(Mapping[str, Any]):
    """The values of one profile: `settings.learning_rate` or `settings["learning_rate"]`. They never change.

    profile: the name of the chosen profile; hardware: what it was written for, such as "8xH100";
    gpus: processes in the job, that is the world size; micro_batch: samples a rank holds at once;
    accumulation: micro-batches between two optimizer steps. All other names are the recipe's own.
    Shown in Jupyter as the profiles side by side, with overridden values marked.
    """

    profile: str
    profiles: Profiles
    _values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # never asked of the values: copy and pickle probe such names
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"settings have no value {name!r}{_nearest(name, self._values)}. "
                f"Profile {self.profile} holds: {', '.join(self._values)}."
            ) from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def global_batch(self) -> int:
        """Samples behind one optimizer step, over all ranks and micro-batches."""
        return self._values["micro_batch"] * self._values["accumulation"] * self._values["gpus"]

    @property
    def batch_identity(self) -> str:
        """The batch arithmetic in words: "micro 64 x accumulation 2 x world 2 = global 256"."""
        v = self._values
        return (
            f"micro {v['micro_batch']} x accumulation {v['accumulation']} x world {v['gpus']} "
            f"= global {self.global_batch}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The values alone, as a dict of its own, without the profile's name."""
        return dict(self._values)

    def replace(self, **changes: Any) -> "Settings":
        """A copy with some values changed, checked as `choose` checks overrides. None is a value here."""
        return dataclasses.replace(self, _values=_changed(self.profile, self.profiles, self._values, changes))

    def of_profile(self, profile: str) -> "Settings":
        """The settings of another profile, to plan for it here; those of this one with all its overrides.

        Raises ValueError for an unknown profile, naming the nearest.
        """
        if profile == self.profile:
            return self
        own = _known(profile, self.profiles)
        return Settings(profile, self.profiles, _changed(profile, self.profiles, own, {}))

    def __repr__(self) -> str:
        body = "".join(f"\n    {name} = {value!r}" for name, value in self._values.items())
        return f"Settings of profile {self.profile}:{body}\n    {self.batch_identity}"

    def _repr_html_(self) -> str:
        left = "text-align:left"
        heads = [f"<b>{html.escape(n)}</b>, chosen" if n == self.profile else html.escape(n) for n in self.profiles]
        rows = [
            [f"<code>{html.escape(name)}</code>", *(self._cell(p, name) for p in self.profiles)]
            for name in self._values
        ]
        head = "".join(f'<th style="{left}">{text}</th>' for text in ["setting", *heads])
        body = "".join("<tr>" + "".join(f'<td style="{left}">{text}</td>' for text in row) + "</tr>" for row in rows)
        caption = f'<caption style="caption-side:bottom;{left}">{self.batch_identity}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cell(self, profile: str, name: str) -> str:
        own = html.escape(_plain(self.profiles[profile][name]))
        if profile != self.profile:
            return own
        now = html.escape(_plain(self._values[name]))
        changed = self._values[name] != self.profiles[profile][name]
        return f"<b>{now}</b> (overrides {own})" if changed else f"<b>{now}</b>"


_FIELDS = {field.name for field in dataclasses.fields(Settings)}


def choose(profile: str, overrides: Mapping[str, Any] | None = None, **profiles: Mapping[str, Any]) -> Settings:
    """The settings of one of several profiles, with overrides laid over it; prints the batch identity.

        settings = choose(profile, {"learning_rate": learning_rate}, smoke={"gpus": 2, ...}, h100x8={...})

    profile: the name of one of `profiles`. Every profile is a dict with the same keys, among them
    `hardware` (str), `gpus`, `micro_batch` and `accumulation` (whole numbers of at least 1).
    overrides: new values by name, as a notebook's parameters give them; None stands for "the profile's
    value". A value must have the type that the profiles give the name; an int will do for a float.
    Raises ValueError for an unknown profile, an unknown name, missing keys or a number below 1, and TypeError
    for a value of the wrong type. The message tells what is allowed, and the nearest name.
    """
    _check_profiles(profiles)
    copies = {name: dict(values) for name, values in profiles.items()}
    own = _known(profile, copies)
    given = {k: own[k] if v is None and k in own else v for k, v in (overrides or {}).items()}
    settings = Settings(profile, copies, _changed(profile, copies, own, given))
    print(settings.batch_identity)
    return settings


def _known(profile: str, profiles: Profiles) -> Mapping[str, Any]:
    if profile not in profiles:
        raise ValueError(f"profile={profile!r} is unknown{_nearest(profile, profiles)}: choose {_either(profiles)}.")
    return profiles[profile]


def _check_profiles(profiles: Profiles) -> None:
    if not profiles:
        raise ValueError("choose() got no profiles: pass at least one, such as smoke=dict(hardware=..., gpus=2).")
    everything = dict.fromkeys([*REQUIRED, *(key for values in profiles.values() for key in values)])
    if taken := [key for key in everything if key.startswith("_") or hasattr(Settings, key) or key in _FIELDS]:
        raise ValueError(f"{', '.join(taken)}: a setting cannot have this name, Settings itself uses it. Rename it.")
    for profile, values in profiles.items():
        if missing := [key for key in everything if key not in values]:
            raise ValueError(
                f"profile {profile} lacks {', '.join(missing)}: every profile must hold the same keys, "
                f"and {', '.join(REQUIRED)} always."
            )
        for name, value in values.items():
            _check(f"profile {profile}: ", name, value, profiles)


def _changed(profile: str, profiles: Profiles, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        if name not in values:
            raise ValueError(
                f"{name!r} is not a setting{_nearest(name, values)}. Profile {profile} holds: {', '.join(values)}."
            )
        _check("", name, value, profiles)
    changed = {name: _like(value, _kinds(name, profiles)) for name, value in {**values, **changes}.items()}
    if changed["gpus"] != values["gpus"] and changed["hardware"] == values["hardware"]:
        # half the GPUs of 8xH100 are 4xH100
        changed["hardware"] = re.sub(rf"^{values['gpus']}(?=x|\b)", str(changed["gpus"]), values["hardware"])
    return changed


def _check(where: str, name: str, value: Any, profiles: Profiles) -> None:
    if name in ("gpus", "micro_batch", "accumulation"):
        if type(value) is not int:
            raise TypeError(f"{where}{name}={value!r} is {_article(value)}: give a whole number of at least 1.")
        if value < 1:
            raise ValueError(f"{where}{name}={value!r} is too small: give a whole number of at least 1.")
        return
    kinds: set[type] = {str} if name == "hardware" else _kinds(name, profiles)
    if isinstance(_like(value, kinds), tuple(kinds)) and (type(value) is not bool or bool in kinds):
        return
    if kinds != {type(None)}:  # None in every profile leaves the type open
        allowed = _either(sorted(kind.__name__.replace("NoneType", "None") for kind in kinds))
        raise TypeError(f"{where}{name}={value!r} is {_article(value)}: give {allowed}, as the profiles do.")


def _kinds(name: str, profiles: Profiles) -> set[type]:
    return {type(values[name]) for values in profiles.values()}


def _like(value: Any, kinds: set[type]) -> Any:
    """1 becomes 1.0 where a profile holds a float, so that training code meets one type."""
    return float(value) if type(value) is int and float in kinds else value


def _article(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def _either(names: Iterable[str]) -> str:
    *most, last = [str(name) for name in names]
    return f"{', '.join(most)} or {last}" if most else last
