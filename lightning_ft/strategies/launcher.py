"""Turns the user's process into the supervisor of its own command, and runs Trainer calls in the ranks."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException, _TunerExitException
from typing_extensions import override

from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Interrupted
from lightning_ft.elastic.options import StartMethod
from lightning_ft.elastic.protocol import RankEnvironment
from lightning_ft.strategies import past_calls
from lightning_ft.strategies.joining import PEER_CHECKPOINT
from lightning_ft.strategies.preemption import EXIT_CODE, Preemption, stopped
from lightning_ft.strategies.takeover import check_takeover, hydra_overrides
from lightning_ft.supervision.command import exec_supervisor
from lightning_ft.supervision.last_words import report_uncaught

_CKPT_PATH_POSITION = {"_fit_impl": 4}


class ElasticLauncher(_Launcher):
    """Runs each Trainer call under the supervisor, which the first call becomes if there is none yet.

    Args:
        num_slots: How many ranks the Trainer asks for.
        start_method: How they are started.
        start_engine: Returns the engine of this process.
        preemption: Returns what is known about the end of the call, once it is set up.
        begin_anew: Called when a call is begun again; returns a fit's ``ckpt_path`` in place of the one that it gets.

    """

    def __init__(
        self,
        num_slots: int,
        start_method: StartMethod,
        start_engine: Callable[[RankEnvironment | None], Engine],
        preemption: Callable[[], Preemption | None],
        begin_anew: Callable[[str, Any], Any],
    ) -> None:
        self._num_slots = num_slots
        self._start_method = start_method
        self._start_engine = start_engine
        self._preemption = preemption
        self._begin_anew = begin_anew

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True  # with one device; with several `launch` says what to do instead

    def kill(self, signum: int) -> None:
        """Nothing to do: the supervisor forwards signals."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        environment = RankEnvironment.of_process()
        num_slots = self._num_slots
        if environment is None and num_slots > 1:
            check_takeover(num_slots)
            exec_supervisor(num_slots, more_arguments=hydra_overrides(), start_method=self._start_method)
        if environment is not None and environment.num_slots != num_slots:
            raise MisconfigurationException(
                f"`FTStrategy` with `Trainer(devices={num_slots})` in a job of {environment.num_slots} ranks: expected"
                f" {environment.num_slots} in each Trainer, and in `lightning-ft run -n` if that started the job. For a"
                " Trainer on one device use `strategy='auto'`."
            )
        report_uncaught()
        _set_num_threads_if_needed(num_slots)
        engine = self._start_engine(environment)
        fn = function.__name__.removeprefix("_").removesuffix("_impl")
        mode = engine.begin_call(fn)
        assert trainer is not None
        if mode == "skip":
            return past_calls.recall(engine, trainer, args[0])
        if mode != "start":
            position = _CKPT_PATH_POSITION.get(function.__name__, len(args))
            asked = args[position : position + 1]
            state = PEER_CHECKPOINT if mode == "join" else self._begin_anew(fn, asked[0] if asked else None)
            args = (*args[:position], state, *args[position + 1 :]) if asked else args
        is_over = False
        try:
            result = self._run(function, *args, **kwargs)
            past_calls.remember(engine, trainer, result)
            engine.end_call()
            is_over = True
        except _TunerExitException:
            past_calls.remember(engine, trainer, None)
            engine.end_call()  # this is how Lightning's tuner ends a call that did what it was for
            raise
        except BaseException as error:
            if isinstance(error, SIGTERMException):
                error.code = error.code or EXIT_CODE
                preemption = self._preemption()
                if preemption is not None and preemption.agreed:
                    preemption.conclude()
            engine.report_exception(error)
            engine.leave()  # hooks that handle the exception may call collectives, which the others do not
            raise
        finally:
            if (preemption := self._preemption()) is not None:
                preemption.stop_listening(is_over=is_over)
        return result

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Collective. Make the call; a rank that was asked to stop meanwhile ends it on all of them."""
        result = exit_of_tuner = preemption = None
        try:
            try:
                result = function(*args, **kwargs)
            except _TunerExitException as error:
                exit_of_tuner = error
            preemption = self._preemption()
            assert preemption is not None
            preemption.ask_all("after the call")
        except Interrupted:  # by one that is in the call while this one may be through
            preemption = self._preemption()
            assert preemption is not None
            preemption.agreed = True
        if preemption.agreed:
            raise stopped()
        if exit_of_tuner is None:
            preemption.forget()
        if exit_of_tuner is not None:
            raise exit_of_tuner
        return result
