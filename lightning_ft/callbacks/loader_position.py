"""LoaderPosition: a checkpoint taken anywhere in an epoch resumes with the next batch, and with all that goes with it."""

import logging
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_ft.data.random_state import random_state, set_random_state
from lightning_ft.data.resumable import ResumableLoader
from lightning_ft.data.sampler_state import sampler_loader, sampler_state
from lightning_ft.loops import logged_results
from lightning_ft.loops.metrics import load_metric_states, metric_states
from lightning_ft.loops.moments import FitMoments, Moment, enter_epoch, enter_fit, finish_batch, without_window
from lightning_ft.loops.saved_positions import drop_positions

log = logging.getLogger(__name__)

_VERSION = 1


class LoaderPosition(Callback):
    """Resume in the middle of an epoch as if the run had never stopped.

    Every Lightning checkpoint gets, for each rank, the position of its training loaders behind the last batch that was
    trained, its random number generators, what was logged and gathered in metrics since the epoch began, and gradients
    that were accumulated and not applied. A fit from such a checkpoint continues with the same batches in the same order,
    the same random numbers, logged values, learning rates and weights; a validation is neither left out nor run twice.

    Args:
        on_world_size_change: What happens if a checkpoint from the middle of an epoch is resumed on another number of ranks.
            Under FTStrategy, batches of a map-style dataset that are left are dealt to the ranks that there are. Anything
            else is a stream of each rank: ``"error"`` refuses it, ``"restart_epoch"`` trains that epoch from its
            beginning, with the weights of the checkpoint. ``"split"``, under FTStrategy only, trains what is left of
            every stream, once: rank ``r`` goes on with stream ``r``, numbered as the rank that it was of, and who is
            through with that takes the next one that nobody reads. Ranks for which there is none have no batch until the
            epoch ends. From the next epoch on, the data is that of as many ranks as there are now.

    Raises:
        ValueError: If ``on_world_size_change`` is none of these.

    Example::

        trainer = Trainer(callbacks=[LoaderPosition(), ModelCheckpoint(every_n_train_steps=100)])
        trainer.fit(model, train_loader, ckpt_path="last")

    """

    def __init__(self, on_world_size_change: Literal["error", "restart_epoch", "split"] = "error") -> None:
        if on_world_size_change not in ("error", "restart_epoch", "split"):
            raise ValueError(
                f"`LoaderPosition(on_world_size_change={on_world_size_change!r})` is not valid: expected "
                '"error", "restart_epoch" or "split".'
            )
        self.on_world_size_change = on_world_size_change
        self._moments: FitMoments | None = None
        self._loaders: list[ResumableLoader] = []
        self._resume: dict[str, Any] | None = None
        self._loops: dict[str, Any] = {}
        self._before_validation: dict[str, Any] = {}
        self._on_epoch_start: Callable[[], None] = lambda: None
        self._wrapped: list[tuple[Any, str]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.on_world_size_change == "split" and not _is_elastic(trainer):
            raise MisconfigurationException(
                '`LoaderPosition(on_world_size_change="split")` needs FTStrategy: under other strategies, ranks whose data'
                ' is of different lengths wait for each other for ever. Use "restart_epoch".'
            )
        self._loaders, self._resume = [], None
        strategy: Any = trainer.strategy
        process, load = strategy.process_dataloader, strategy.load_checkpoint

        def process_dataloader(dataloader: object) -> object:
            processed = process(dataloader)
            return self._follow(trainer, processed) if trainer.training else processed

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            checkpoint = load(*args, **kwargs)
            self._give_own_data(trainer, checkpoint)
            return checkpoint

        strategy.process_dataloader, strategy.load_checkpoint = process_dataloader, load_checkpoint
        self._wrapped = [(strategy, "process_dataloader"), (strategy, "load_checkpoint")]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._moments = FitMoments(trainer)
        self._moments.on_fit = lambda proceed: self._run_fit(trainer, proceed)
        self._moments.on_fit_loop_start = lambda proceed: self._start_fit_loop(trainer, proceed)
        self._moments.on_epoch_loop_start = lambda fetcher, proceed: self._start_epoch_loop(trainer, fetcher, proceed)
        self._moments.on_validation = lambda: self._note_before_validation(trainer)
        self._moments.watch()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._moments is not None:
            self._moments.close()  # but kept: the script may save a checkpoint after the fit
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Collective. Add what each rank needs to continue from here."""
        if self._moments is None:
            return
        window = getattr(trainer.strategy, "window", None)
        moment = self._moments.now(gives_up_windows=_keeps_positions(trainer) and window is None)
        section = self._section(trainer, pl_module, moment) | {"window": window}
        section |= {"rank": _lasting_rank(trainer), "datamodule": checkpoint.get(_name_of_data(trainer))}
        ranks = _gather(trainer, section)
        if ranks is not None:
            checkpoint["callbacks"][self.state_key] = {
                "version": _VERSION,
                "world_size": _num_ranks(trainer),
                "moment": moment,
                # Of its own: under FTStrategy, the counters of a job that was asked to stop are written for Lightning.
                "loops": deepcopy(checkpoint["loops"]["fit_loop"]),
                "ranks": ranks,
            }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if trainer.state.fn != TrainerFn.FITTING or not state:
            return
        if state.get("version") != _VERSION:
            raise MisconfigurationException(
                f"The checkpoint's loader position has format {state.get('version')}, expected {_VERSION}. Resume with the"
                " lightning_ft that wrote it, or without `LoaderPosition`."
            )
        self._loops, moment = state["loops"], state["moment"]
        section = _own_section(state, _lasting_rank(trainer))
        saved = section["loaders"] = _with_sources(section["loaders"], state["ranks"])
        before, now = _num_streams(saved) or state["world_size"], _num_ranks(trainer)
        is_elsewhere = _is_elastic(trainer) and "positions" in saved
        if (
            before != now
            and moment["within_epoch"]
            and not (_can_be_dealt(saved) or (is_elsewhere and _is_map_style(saved)))
        ):
            if self.on_world_size_change == "error" or (self.on_world_size_change == "split" and not _num_streams(saved)):
                raise MisconfigurationException(
                    f"The checkpoint was taken in the middle of an epoch on {before} ranks, but there are {now} now, and"
                    " what each of them had left of its data is known to itself only. Resume on as many, from the end of"
                    ' an epoch, or with `LoaderPosition(on_world_size_change=...)`: "restart_epoch", or, if FTStrategy'
                    ' saved it, "split".'
                )
            if self.on_world_size_change == "split":
                _allow_split(saved)
            else:
                moment = {"within_epoch": False, "epochs": moment["epochs"]}
                section["loaders"] = {}
        if moment.get("is_accumulating") and is_elsewhere:
            moment = without_window(moment, moment["trained"] % trainer.accumulate_grad_batches)
            section["gradients"] = {}
        elif moment.get("is_accumulating") and section.get("window") is not None:
            if before == now and state["ranks"].keys() >= {*range(now)}:
                saved["kept"][0]["window"] = True
            else:  # nobody has the gradients of some ranks
                moment = without_window(moment, len(section["window"]))
                section["gradients"] = {}
        drop_positions(checkpoint["loops"]["fit_loop"])  # those of rank 0, and read ahead
        self._resume = {"moment": moment, **section, "num_ranks": state["world_size"]}
        for loader in self._loaders:
            loader.deferred = True

    # Saving.

    def _section(self, trainer: Trainer, pl_module: LightningModule, moment: Moment) -> dict[str, Any]:
        results = trainer.fit_loop.epoch_loop._results
        connector = trainer._logger_connector
        section: dict[str, Any] = {
            "random": _random_state(trainer),
            "loaders": self._positions(trainer, moment),
            "buffers": _own_buffers(trainer, pl_module),
            "callback_metrics": dict(connector._callback_metrics if trainer.interrupted else trainer.callback_metrics),
            "logged_metrics": dict(connector._logged_metrics),
        }
        of_epoch = moment["within_epoch"]
        reset_soon = [metric.value for metric in trainer.fit_loop.epoch_loop.val_loop._results.values()]
        reset_soon += [] if of_epoch else [metric.value for metric in results.values()]
        section["metrics"] = metric_states(pl_module, leave_out=[m for m in reset_soon if not isinstance(m, Tensor)])
        if not of_epoch:
            return section
        section |= {
            "results": logged_results.describe(results, to_same_rank=True),
            "first_loop_iter": connector._first_loop_iter,
            "current_fx": connector._current_fx,
            "gradients": _gradients(pl_module) if moment["is_accumulating"] else {},
        }
        if moment["tail"] == "validation":  # which begins again
            section |= self._before_validation
        elif moment["tail"] == "after validation":
            section |= {"first_loop_iter": self._before_validation["first_loop_iter"], "current_fx": None}
        return section

    def _note_before_validation(self, trainer: Trainer) -> None:
        connector = trainer._logger_connector
        self._before_validation = {
            "first_loop_iter": connector._first_loop_iter,
            "current_fx": connector._current_fx,
            "random": _random_state(trainer),
        }

    def _positions(self, trainer: Trainer, moment: Moment) -> dict[str, Any]:
        combined = trainer.fit_loop._combined_loader
        iterator = None if combined is None else combined._iterator
        if combined is not None and _keeps_positions(trainer):
            return {
                "kept": combined._state_dicts(),
                "samplers": list(map(sampler_state, combined.flattened)),
                "sources": [getattr(loader, "source_state", lambda: None)() for loader in combined.flattened],
            }
        if not self._loaders or combined is None or iterator is None:
            return {}
        num_ahead = iterator._idx - moment["trained"] if moment["within_epoch"] else 0
        return {
            "positions": [loader.position(num_ahead, between_epochs=not moment["within_epoch"]) for loader in self._loaders],
            "consumed": list(getattr(iterator, "_consumed", [])),
        }

    # Resuming.

    def _follow(self, trainer: Trainer, dataloader: Any) -> object:
        if getattr(dataloader, "keeps_position", False):
            return dataloader
        fit_loop = trainer.fit_loop
        loader = ResumableLoader(dataloader, lambda: fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        loader.deferred = self._resume is not None
        if fit_loop._combined_loader is not None and len(self._loaders) == len(fit_loop._combined_loader.flattened):
            self._loaders = []  # they are made again, for another epoch
        self._loaders.append(loader)
        return loader

    def _run_fit(self, trainer: Trainer, proceed: Any) -> None:
        """Also if all steps are done: what belongs to the last one, such as a validation, may not be."""
        epoch_loop = trainer.fit_loop.epoch_loop
        max_steps = epoch_loop.max_steps
        if self._resume is not None and self._resume["moment"].get("tail"):
            epoch_loop.max_steps = -1
            self._on_epoch_start = lambda: setattr(epoch_loop, "max_steps", max_steps)
        try:
            proceed()
        finally:
            epoch_loop.max_steps = max_steps

    def _start_fit_loop(self, trainer: Trainer, proceed: Any) -> None:
        resume = self._resume
        if resume is None:
            proceed()
            return
        moment, fit_loop = resume["moment"], trainer.fit_loop
        enter_fit(trainer, self._loops, moment)
        _restore_buffers(trainer.lightning_module, resume)
        _restore_metrics(trainer, resume)
        if moment.get("plateau_due"):  # Lightning forgets it, since the checkpoint was taken just before
            enter_epoch_end = fit_loop.epoch_progress.current
            enter_epoch_end.completed -= 1
            fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            enter_epoch_end.completed += 1
        proceed()
        if not moment["within_epoch"]:
            _set_random_state(trainer, resume["random"])

    def _start_epoch_loop(self, trainer: Trainer, data_fetcher: Any, proceed: Any) -> None:
        resume, self._resume = self._resume, None
        if resume is None:
            proceed()
            self._look_ahead(data_fetcher)
            return
        moment = resume["moment"]
        self._on_epoch_start()
        if moment["within_epoch"]:
            enter_epoch(trainer, self._loops, moment)
        self._start_loaders(trainer, data_fetcher, resume)
        proceed()
        self._look_ahead(data_fetcher)
        if not moment["within_epoch"]:
            return
        connector = trainer._logger_connector
        logged_results.take_over(trainer, trainer.fit_loop.epoch_loop._results, resume["results"])
        _restore_metrics(trainer, resume)
        connector._first_loop_iter, connector._current_fx = resume["first_loop_iter"], resume["current_fx"]
        parameters = dict(trainer.lightning_module.named_parameters())
        for name, gradient in resume["gradients"].items():
            parameters[name].grad = _as_gradient(parameters[name], gradient)
        if moment["is_accumulating"] and resume.get("window") is not None:
            strategy: Any = trainer.strategy
            strategy.enter_window(resume["window"])
        _set_random_state(trainer, resume["random"])
        if moment["tail"]:
            finish_batch(trainer, data_fetcher, moment["tail"])

    def _start_loaders(self, trainer: Trainer, data_fetcher: Any, resume: dict[str, Any]) -> None:
        saved = resume["loaders"]
        for loader in self._loaders:
            loader.deferred = False
        if not saved:
            iter(data_fetcher)
            return
        if "kept" not in saved and _keeps_positions(trainer) and _is_map_style(saved):
            _load_trained(trainer, data_fetcher, resume["num_ranks"], resume["moment"])
            return
        if ("kept" in saved) != _keeps_positions(trainer):
            raise MisconfigurationException(
                "The checkpoint was taken in the middle of an epoch under another kind of strategy. Resume with the"
                " strategy that it was made with, or from the end of an epoch. One process reads streams that FTStrategy"
                " saved if it is started by `lightning-ft run -n 1`."
            )
        if "kept" in saved:
            _load_kept(trainer, data_fetcher, saved, resume["moment"])
            return
        if len(saved["positions"]) != len(self._loaders):
            raise MisconfigurationException(
                f"The checkpoint has the positions of {len(saved['positions'])} training loaders, but there are"
                f" {len(self._loaders)} now. Resume with the loaders that it was made with, or without `LoaderPosition`."
            )
        for loader, position in zip(self._loaders, saved["positions"], strict=True):
            loader.resume(position)
        iter(data_fetcher)
        combined = trainer.fit_loop._combined_loader
        assert combined is not None
        iterator: Any = combined._iterator
        if resume["moment"]["within_epoch"]:
            iterator._idx += resume["moment"]["trained"]
            if saved["consumed"]:
                iterator._consumed = list(saved["consumed"])

    def _look_ahead(self, data_fetcher: Any) -> None:
        for loader in self._loaders:
            loader.is_read_ahead = data_fetcher.length is None

    def _give_own_data(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Put this rank's part of the datamodule's state in the place of rank 0's."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not state or state["world_size"] != _num_ranks(trainer):
            return
        section = state["ranks"].get(_lasting_rank(trainer), {})
        if section.get("datamodule") is not None:
            checkpoint[_name_of_data(trainer)] = section["datamodule"]


def _own_section(state: dict[str, Any], rank: int) -> dict[str, Any]:
    ranks = state["ranks"]
    if rank in ranks:
        return dict(ranks[rank])
    # Written by one rank alone, as an exception ended it: the others were as far, and drew as many random numbers.
    section = dict(next(iter(ranks.values())))
    if rank >= state["world_size"]:  # there was no such rank, so nothing was logged in it
        section |= {"metrics": {}, "results": [{**result, "values": {}} for result in section.get("results", [])]}
    return section


def _can_be_dealt(saved: dict[str, Any]) -> bool:
    """Whether any number of ranks can share what is left: batches that all of them can read."""
    kept = saved.get("kept", [])
    return bool(kept) and all("num_slots" in loader for loader in kept)


def _num_streams(saved: dict[str, Any]) -> int:
    """Of how many streams there are positions that any rank can go on from; 0: of none."""
    kept = saved.get("kept", [])
    return len(kept[0]["plan"]["done"]) if kept and not _can_be_dealt(saved) else 0


def _with_sources(saved: dict[str, Any], ranks: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Put what each rank knew about its own stream beside the position of all."""
    if not _num_streams(saved):
        return saved
    sources = [source for section in ranks.values() for source in section["loaders"].get("sources", ())]
    first, *others = saved["kept"]
    return {**saved, "kept": [{**first, "sources": {own["stream"]: own for own in sources if own is not None}}, *others]}


def _allow_split(saved: dict[str, Any]) -> None:
    saved["kept"][0]["split"] = True


def _is_elastic(trainer: Trainer) -> bool:
    return hasattr(trainer.strategy, "gather_objects")


def _num_ranks(trainer: Trainer) -> int:
    """How many ranks there are if none is missing."""
    return trainer.strategy.num_processes if _is_elastic(trainer) else trainer.world_size  # type: ignore[attr-defined]


def _lasting_rank(trainer: Trainer) -> int:
    """What this rank is in the next run, if none is missing then."""
    rank = trainer.global_rank
    members: tuple[int, ...] = getattr(trainer.strategy, "members", ())
    return members[rank] if _is_elastic(trainer) and rank < len(members) else rank


def _keeps_positions(trainer: Trainer) -> bool:
    """Whether the strategy deals the training data, and its loaders know what is left."""
    combined = trainer.fit_loop._combined_loader
    return combined is not None and all(getattr(loader, "keeps_position", False) for loader in combined.flattened)


def _is_map_style(saved: dict[str, Any]) -> bool:
    """Whether the positions, of another strategy, are that of one dataset which all ranks can read."""
    return [position["kind"] for position in saved.get("positions", [])] == ["map-style"]


def _load_trained(trainer: Trainer, data_fetcher: Any, num_ranks: int, moment: Moment) -> None:
    """Deal what was left of the epoch under another strategy on ``num_ranks`` ranks."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    if moment["within_epoch"]:
        loader: Any = combined.flattened[0]
        loader.load_trained(moment["epochs"], num_ranks, moment["trained"])
    _enter_loaders(trainer, data_fetcher, moment)


def _load_kept(trainer: Trainer, data_fetcher: Any, saved: dict[str, Any], moment: Moment) -> None:
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    for loader, states in zip(combined.flattened, saved["samplers"], strict=True):
        sampler_loader(loader, states)()
    if moment["within_epoch"]:
        combined._load_state_dicts(saved["kept"])
    _enter_loaders(trainer, data_fetcher, moment)


def _enter_loaders(trainer: Trainer, data_fetcher: Any, moment: Moment) -> None:
    """Begin to iterate what knows its position."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    iter(data_fetcher)
    remaining = getattr(combined.flattened[0], "remaining_steps", None)
    if moment["within_epoch"]:
        iterator: Any = combined._iterator
        iterator._idx += moment["trained"]  # for a step that takes its batches itself
    if moment["within_epoch"] and trainer.fit_loop.max_batches != float("inf") and remaining is not None:
        trainer.fit_loop.max_batches = moment["trained"] + remaining
        if trainer.val_check_interval == 1.0 and isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, trainer.fit_loop.max_batches)


def _gather(trainer: Trainer, section: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
    """Collective. Return the sections of all ranks in rank 0, elsewhere this rank's own; None where none is asked for."""
    rank, size = section["rank"], trainer.world_size
    # After an exception the other ranks may be anywhere: whoever waited for them might wait forever.
    is_alone = trainer.interrupted and not isinstance(sys.exc_info()[1], SIGTERMException)
    if is_alone:
        return {rank: section}
    gather_elastically = getattr(trainer.strategy, "gather_objects", None)
    if gather_elastically is not None:  # which knows, even of a rank that is alone, whether another waits for this state
        gathered = gather_elastically(section)
        return None if gathered is None else {row["rank"]: row for row in gathered}
    if size == 1:
        return {rank: section}
    rows: list[Any] | None = [None] * size if rank == 0 else None
    torch.distributed.gather_object(section, rows, dst=0)
    return {row["rank"]: row for row in rows or [section]}


def _name_of_data(trainer: Trainer) -> str:
    """Under which Lightning keeps the datamodule's state; no key of a checkpoint if there is none."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return "" if data is None else type(data).__qualname__


def _random_state(trainer: Trainer) -> dict[str, Any]:
    state = random_state()
    device = trainer.strategy.root_device
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(trainer: Trainer, state: dict[str, Any]) -> None:
    set_random_state(state)
    if "cuda" in state and trainer.strategy.root_device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), trainer.strategy.root_device)


def _own_buffers(trainer: Trainer, pl_module: LightningModule) -> dict[str, Tensor]:
    """Running statistics where each rank has its own, of which a checkpoint has those of any rank."""
    if not isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy):
        return {}
    named = pl_module.named_buffers()
    return {name: buffer.detach().clone() for name, buffer in named if not isinstance(buffer, DTensor)}


def _restore_buffers(pl_module: LightningModule, resume: dict[str, Any]) -> None:
    buffers = dict(pl_module.named_buffers())
    for name, value in resume.get("buffers", {}).items():
        buffers[name].copy_(value)


def _gradients(pl_module: LightningModule) -> dict[str, Tensor]:
    named = pl_module.named_parameters()
    return {name: _own_part(parameter.grad).detach().clone() for name, parameter in named if parameter.grad is not None}


def _own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the whole, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_gradient(parameter: Tensor, own: Tensor) -> Tensor:
    """Make what a rank held of a gradient the gradient of ``parameter`` again."""
    own = own.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return own
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _restore_metrics(trainer: Trainer, resume: dict[str, Any]) -> None:
    load_metric_states(trainer.lightning_module, resume["metrics"])
    connector, device = trainer._logger_connector, trainer.strategy.root_device
    for name, live in (("callback_metrics", connector._callback_metrics), ("logged_metrics", connector._logged_metrics)):
        live.update({key: value.to(device) for key, value in resume[name].items()})
