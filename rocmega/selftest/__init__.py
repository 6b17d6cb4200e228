"""Whether this machine's device does what rocmega needs: one command after an installation, and before a bug report.

`rocmega selftest`, `python -m rocmega.selftest` and, from Python, `selftest()`. The checks are in checks.py. One that
fails does not end the others; the report is written after every one, so that a machine which hangs leaves one, too.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.selftest.checks import Bench, Check
    from rocmega.selftest.report import Report, Result

__all__ = ["selftest"]


def selftest(device: str = "auto", *, soak: int = 0, file: Path | None = None, progress: Progress = silent) -> Report:
    """Runs all checks on a device: auto, host, hip or cuda. soak: steps of the long run. file: where the report goes.

    Raises DriverError if there is no such device, RequestError if the file cannot be written.
    """
    from rocmega.compare.environment import environment
    from rocmega.doctor import collect
    from rocmega.drivers.select import pick
    from rocmega.selftest.checks import CHECKS, Bench
    from rocmega.selftest.report import Report, Result

    progress("looking around")
    report = Report(doctor=[finding.to_json() for finding in collect()])
    if file is not None:
        report.write(file)  # of a device that cannot be opened this is what there is to say
    driver = pick(device)
    report.environment = environment(driver)
    bench = Bench(driver, soak, progress)
    try:
        for number, (name, check) in enumerate(CHECKS.items()):
            progress(name, number, len(CHECKS))
            report.results.append(Result(name, "running", "did not end"))
            if file is not None:
                report.write(file)
            report.results[-1] = _run(name, check, bench)
    finally:
        bench.close()
        if file is not None:
            report.write(file)
    return report


def _run(name: str, check: Check, bench: Bench) -> Result:
    from rocmega.selftest.checks import Skipped
    from rocmega.selftest.report import Result

    start = time.monotonic()
    try:
        message, values = check(bench)
    except Skipped as reason:
        return Result(name, "skipped", str(reason))
    except Exception as error:  # whatever it is, it is the report's content
        message = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        details = "".join(traceback.format_exception(error))
        return Result(name, "failed", f"{type(error).__name__}: {message}", time.monotonic() - start, {}, details)
    return Result(name, "ok", message, time.monotonic() - start, values)
