"""Will it fit? The peak memory of a full-size job per strategy and card, before a GPU or a weight is touched.

    answer = fit.module(build_model, make_batch, loss_fn, settings, optimizer=make_optimizer)   # any nn.Module
    answer = fit.language_model("llama-3.1-8b", settings, sequence=2048, lora=16)               # Transformers
    answer            # in a notebook: the table and the advice
    answer.plot()     # the picture

`python -m helpers.fit --model gpt-oss-20b --lora 16 --gpus 8xH100` prints the same.
"""

from helpers.fit.answer import Fit
from helpers.fit.cards import UnknownCard
from helpers.fit.language import UnknownModel, language_model
from helpers.fit.modules import Batch, module
from helpers.fit.strategies import ImpossibleCombination

__all__ = ["Batch", "Fit", "ImpossibleCombination", "UnknownCard", "UnknownModel", "language_model", "module"]
