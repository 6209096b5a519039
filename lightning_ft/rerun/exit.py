"""How a job ends because of a value that was rejected."""

from lightning_ft.rerun.states import EXIT_CODE_FAILED_ON_RESULT_VALIDATION, EXIT_CODE_RESUME_TO_DISAMBIGUATE

_MEANINGS = {
    EXIT_CODE_RESUME_TO_DISAMBIGUATE: "resume it on other devices to tell whether a device or the data is to blame",
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION: "a rejected value stays what it is when the step is run again",
}


class RerunExit(SystemExit):
    """Ends the process with an exit code that launchers know.

    Args:
        code: 16 or 17.

    """

    def __str__(self) -> str:
        """Return what whoever started the job is to do, or to know."""
        return _MEANINGS[int(self.code or 0)]
