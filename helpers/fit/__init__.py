"""Will it fit? The peak memory of a full-size job per strategy and card, before a GPU or a weight is touched.

    answer = fit.module(build_model, make_batch, loss_fn, settings, optimizer=make_optimizer)   # any nn.Module
    answer = fit.language_model("llama-3.1-8b", settings, sequence=2048, lora=16)               # Transformers
    answer            # in a notebook: the table and the advice
    answer.plot()     # the picture

`python -m helpers.fit --model gpt-oss-20b --lora 16 --gpus 8xH100` prints the same. Names are resolved on first use,
so that the command can check its options without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from helpers.fit.vocabulary import ImpossibleCombination, UnknownCard, UnknownModel

if TYPE_CHECKING:
    from helpers.fit.answer import Fit
    from helpers.fit.language import language_model
    from helpers.fit.modules import Batch, module

_HOME = {"Batch": "modules", "Fit": "answer", "language_model": "language", "module": "modules"}

__all__ = ["Batch", "Fit", "ImpossibleCombination", "UnknownCard", "UnknownModel", "language_model", "module"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"helpers.fit has no name {name!r}: it offers {', '.join(__all__)}.")
    return getattr(import_module(f"helpers.fit.{_HOME[name]}"), name)
