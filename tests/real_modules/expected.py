"""Outcomes that many rows share."""

from real_modules.table import Refused

ONE = Refused(mend={"window": 1})
OFFLOAD = Refused(mend={"micro_batch": "offload"})


def by(*names: str) -> Refused:  # exact where these submodules run in micro-batches
    return Refused(mend={"row_wise": list(names)})
