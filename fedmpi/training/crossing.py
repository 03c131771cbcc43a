"""Which kinds of messages a run may send, by its settings alone."""

from typing import Any

from fedmpi.aggregation.sending import in_codec
from fedmpi.comm.crosses import OWN
from fedmpi.tasks.custom import Task

EVERY_RUN = ("machinery", "settings", "run", "file digests", "sample counts", "losses", "average digests", "evaluation")
IN_CASE = ("errors", "checkpoints")  # of any run


def kinds_of(config: Any) -> set[str]:
    """Names of `fedmpi.comm.crosses.KINDS`, for a `Config`. Not collective; no file is opened."""
    sending, studies, is_private = config.sending, config.studies, config.layers.private is not None
    aggregation = in_codec(sending.aggregation, sending.codec)
    found = {*EVERY_RUN, *IN_CASE, *aggregation.crosses} - ({"losses"} if aggregation.needs_exponents else set())
    found |= config.task.crosses(is_private or bool(studies.methods), config.data.scores)
    found |= {"buffers", "model"} if config.task.has_model else {"model"}
    found |= {"left out"} if config.faults.faulty == "leave_out" else set()
    found |= {"silo models"} if studies.cross_site else set()
    found |= {"hidden sums"} if studies.methods else set()
    found -= {"test counts"} if aggregation.hides else set()
    # A task of the class `Task` sends nothing by itself.
    parts = [*sending.as_objects().values(), *([] if isinstance(config.task, Task) else [config.task])]
    is_own = any(type(part).__module__.partition(".")[0] != "fedmpi" for part in parts)
    return found | ({OWN} if is_own else set())
