"""Make the class's notebooks: `python -m examples.homework.make [--out DIR]`.

Writes the solution, the template and every notebook among the submissions: the same bytes each time. The other
submissions are plain text and were written by hand.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

from examples.homework import class_notebooks as written
from examples.homework.notebook import Output, R, code, notebook, printed, text

SEED = 48123
ORDERS, DOUBLED, WITHOUT_AMOUNT = 4175, 37, 58  # as the solution counts them
CUSTOMERS, MEAN_AMOUNT = 1180, 84
# Of 1,000 orders, January to December. With this seed the rows give the solution's five results.
MONTHS = (40, 40, 50, 60, 80, 72, 188, 80, 60, 100, 100, 130)
CORRUPT_SHARE = 0.62  # of the file that reached the server


def huge() -> str:
    """A fair notebook whose author printed all rows three times: outputs of about 600,000 characters."""
    orders = _orders()
    unique = [row for row in orders if not row.endswith(" again")]
    complete = [row for row in unique if not row.endswith("NA")]
    return notebook(
        R,
        text("# Riverside Outfitters\nMilo Marshgrove. I print the data at every step so that one can see it."),
        code('source("report.R")\norders <- read.csv("orders.csv")\nprint(orders, max = 1e6)', _printout(orders)),
        code("unique <- orders[!duplicated(orders$order_id), ]\nprint(unique, max = 1e6)", _printout(unique)),
        code("complete <- unique[!is.na(unique$amount), ]\nprint(complete, max = 1e6)", _printout(complete)),
        *written.after_the_printout(),
    )


def _orders() -> list[str]:
    """The order file as R prints it; a second copy of an order is marked with " again"."""
    draw = random.Random(SEED)
    incomplete = set(draw.sample(range(ORDERS), WITHOUT_AMOUNT))
    doubled = set(draw.sample(sorted(set(range(ORDERS)) - incomplete), DOUBLED))
    rows: list[str] = []
    for number in range(ORDERS):
        (month,) = draw.choices(range(1, 13), MONTHS)
        day = f"2023-{month:02d}-{draw.randint(1, 28):02d}"
        amount = "      NA" if number in incomplete else f"{draw.gammavariate(2.0, MEAN_AMOUNT / 2):8.2f}"
        customer, region = draw.randint(1, CUSTOMERS), draw.choice(("North", "South", "Lakes"))
        row = f"R{100_001 + number}       C{customer:04d} {day}  {region} {amount}"
        rows += [row, f"{row} again"] if number in doubled else [row]
    return [f"{position:<4}  {row}" for position, row in enumerate(rows, 1)]


def _printout(rows: list[str]) -> Output:
    heading = "     order_id customer_id order_date region   amount"
    return printed("\n".join([heading, *(row.removesuffix(" again") for row in rows)]) + "\n")


def corrupt() -> str:
    """A good notebook of which only the beginning was uploaded."""
    whole = written.excellent()
    return whole[: int(len(whole) * CORRUPT_SHARE)]


FILES: dict[str, Callable[[], str]] = {
    "solution.ipynb": written.solution,
    "template.ipynb": written.template,
    "submissions/fairweatherada_48101_910001_sales-and-churn.ipynb": written.excellent,
    "submissions/brooksidebenno_48102_910002_homework4.ipynb": written.code_without_words,
    "submissions/cloverfieldcato_LATE_48103_910003_Untitled3.ipynb": written.errors,
    "submissions/dewhurstdelphine_48104_910004_analysis.ipynb": written.in_python,
    "submissions/kettlewellkit_48111_910011_homework4.ipynb": written.empty,
    "submissions/larkspurlena_48112_910012_final.ipynb": corrupt,
    "submissions/marshgrovemilo_LATE_48113_910013_final-FINAL.ipynb": huge,
    "submissions/nettlebynora_48114_910014_hw4.ipynb": written.injection,
}


def make(out: Path) -> None:
    """Write every generated file below `out`."""
    for name, content in FILES.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content(), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the notebooks of the made-up class.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    out = parser.parse_args().out
    make(out)
    for name in FILES:
        print(f"{(out / name).stat().st_size:>9,}  {name}")


if __name__ == "__main__":
    main()
