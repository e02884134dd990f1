"""The buffers of a report as comma-separated values."""

import csv
import dataclasses
import io

from jaxmem.analysis import Buffer, MemoryReport


def buffers_csv(report: MemoryReport) -> str:
    """The buffers at the peak, largest first: a line of field names, then a line a buffer.

    Names are as the program has them; a spreadsheet may take one that begins with "=" for a formula.
    """
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(Buffer)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(buffer, name) for name in names] for buffer in report.buffers)
    return text.getvalue()
