"""How many of a class's names reach a prompt: 500 made-up submissions with 3,000 planted mentions, read as files.

Half of the class comes as Canvas names its files (family and given name in one word, in small), half as Moodle does.
Each submission is a script, a report or a notebook of ordinary course prose and code, with six mentions of its author
or of somebody else of the class: authors' lines, comments, e-mails, paths, git remotes, tracebacks, YAML and JSON, in
the spellings, orders and separators that people and tools use. Names are of many cultures; some have two letters, some
are Chinese, some are words of English or of R ("Max Long", "Mean").

A mention is found if no part of the name is left where it stood. Another word has changed if it doesn't stand where it
stood; words are counted outside of mentions. What nobody promises to find is not planted: nicknames, a given name alone
in prose, and a name that is an ordinary word where only the reader's mind can tell. `--held-out` takes other names.

`names_only_seconds`: processor time for one submission of the largest size that holds nothing but names of a class of
500 of whom all have one family name, beyond what the class itself takes.

`--quick` has 60 submissions.
"""

import itertools
import json
import random
import re
import sys
import tempfile
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from grading.names.pseudonyms import pseudonymise
from grading.submissions.reading import Submission, SubmissionPart, read_submissions

SUBMISSIONS, QUICK_SUBMISSIONS, MENTIONS_EACH = 500, 60, 6
LARGEST = 1_020_000  # characters that are read of one submission
FOUND_AT_LEAST, CHANGED_AT_MOST = 0.99, 0.001

# (given, family) as people write them.
NAMES = """\
Ada|Fairweather;Cato|Cloverfield;Delphine|Dewhurst;Benno|Brookside;Mira|Wolkenstein;Odo|Kestrel;
José|Hernández;André|Duval;Zoë|Kröger;Jürgen|Müller;Søren|Østergård;Łukasz|Wójcik;Siân|Llewellyn;
Anne-Marie|Lefèvre;Jean-Luc|Desrosiers;Jan|van den Berg;Maria|de la Cruz;Ludwig|von Ahlfeld;
Sinead|O'Connor;Aoife|O'Neill;Conor|McGillicuddy;Bo|Wu;Li|Ming;Xi|Chen;Yu|Zhao;Ying|Ng;Jia Hui|Lim;
Wei|Ou;Minh|Tran;Thi Lan|Pham;Duc Anh|Hoang;Haruto|Tanabe;Yuki|Ito;Min-jun|Kwak;Ji-woo|Seo;李|明|;
王|小波|;田中|陽菜|;김|민수|;欧阳|晓明|;Priya|Raghunathan;Arjun|Iyer;Sai|Rao;Fatima|al-Zahrani;Omar|bin Rashid;
Ömer|Yıldız;Çağla|Şahin;Olena|Kovalchuk;Dmitri|Vorontsov;Jelena|Đorđević;Nikos|Papadakis;
Kwame|Oduya;Chioma|Nwosu;Thandiwe|Mabaso;Ígor|Conceição;Gabriel|García Márquez;
Ana Sofía|Quintanilla;Mark|Long;Will|Rose;Grace|List;Max|Mean;May|Young;Rose|Park;Bill|Price;An|Le;
Will|Fairbrother;Grace|Okonjo;Mark|Tennyson;Max|Hollander;Jordan|Fisher;Penny|Table"""
HELD_OUT = """\
Tobias|Quillfeather;Imogen|Marchbanks;Rufus|Thistlewood;Noémie|Bélanger;Håkon|Bjørnstad;
Jörg|Größmann;Žofie|Dvořáková;Ştefan|Ionescu;Anna-Lena|Weiß;Pieter|van der Merwe;Lucía|del Río;
Otto|von Trautheim;Niamh|O'Shaughnessy;Ewan|MacAskill;Fu|He;Ai|Xu;Jin|Li;Hao Yu|Teo;Quoc Bao|Vo;
Thi Mai|Dang;Ren|Abe;Sakura|Ueda;Seo-yeon|Bae;Do-yun|Chu;张|伟|;刘|思远|;佐藤|健|;박|서연|;司马|文静|;
Kavya|Subramaniam;Rohan|Nair;Dev|Roy;Layla|el-Masri;Yusuf|ibn Salim;Gökçe|Uğurlu;İpek|Demirtaş;
Oksana|Shevchuk;Pavel|Zhdanov;Miloš|Živković;Eleni|Stavrou;Ngozi|Eze;Sipho|Dlamini;Abena|Asante;
João|Gonçalves;Inés|Ruiz Cabello;Luis Ángel|Montero;Frank|Stone;Faith|Day;Art|Field;Norm|Range;
April|Summers;Dean|Key;Sue|Brown;Le|Ha;Hope|Ravensdale;Ray|Pemberton;Dawn|Achterberg;Guy|Lindqvist;
Georgia|Pearson;Chance|Matrix"""
_ORDINARY = frozenset(
    """
    mark long will rose grace list max mean may young park bill price an le jordan fisher penny table frank
    stone faith day art field norm range april summers dean key sue brown ha hope ray dawn guy georgia pearson
    chance matrix
    """.split()  # noqa: SIM905
)

_PROSE = """\
We will mark the long list by hand and then take the mean of each group.
Long tables are hard to read, so the max and the price stand first.
Mark all rows with a missing price. Will this change the mean? It may.
The rose plot shows the range of each field; a list of keys is below.
Fisher's exact test gives p = 0.03, and Pearson's r is 0.61; Student's t agrees.
In Georgia and Jordan the price rose in May and April; in the park it did not.
Grace periods of a day are an art, and a chance matrix is the norm here.
By the way, the young and the old differ: max(price) is 12.5 on day 3.
I hope to be frank: the stone weighs as much as the brown one, a key point.
Mean absolute error is reported in Table 2, with the range in brackets.
An a priori test needs le Cam's lemma; as is, we do not have it.
To do: list the steps, set the seed, and explain what the min and the max mean.
The churn rate fell from 0.21 to 0.17 after the campaign in the second region.
Revenue by region and month is plotted first; outliers are kept on purpose.
May I ask whether the summers were longer? Price Park is not in the data.
I used a left join because some customers have no sales in the quarter.
Results are rounded to two digits. The model is linear in both variables.
Dean and guy are words, ray tracing is a method, and dawn is a time of day.
"""
_CODE = {
    "r": """\
library(dplyr)
sales <- read.csv("data/sales.csv")
price_list <- list(min = min(sales$price), max = max(sales$price), mean = mean(sales$price))
mean_long <- mean(long_list, na.rm = TRUE)
if (is.na(mean_long)) mean_long <- 0
long <- pivot_longer(wide, cols = may:april, names_to = "month", values_to = "price")
will_stay <- sales %>% group_by(region) %>% summarise(max_price = max(price), range = diff(range(price)))
mark <- ifelse(sales$price > max_mean, "rose", "fell")
fit <- lm(price ~ field + day, data = sales); print(matrix(coef(fit), nrow = 1))
list_max <- sapply(price_list, max); key <- names(list_max)
""",
    "py": """\
import pandas as pd
from typing import List, Dict
sales: List[float] = list(pd.read_csv("data/sales.csv")["price"])
mean_max = max(mean(sales), long_max)
def max_mean(price: List[float], key: str = "day") -> float:
    table = {"min": min(price), "max": max(price), "range": max(price) - min(price)}
    return table.get(key, sum(price) / len(price))
class MeanList(list):
    will_mark: bool = False
long = [p for p in sales if p > max_mean(sales)]; print(f"{len(long)} long, mean {max_mean(long):.2f}")
assert isinstance(long, list) and not any(p is None for p in long)
""",
}


@dataclass(frozen=True, slots=True)
class Person:
    """A made-up student. `glued`: written without a space, family first."""

    given: str
    family: str
    glued: bool
    number: int

    @property
    def full(self) -> str:
        """As it is said."""
        return self.family + self.given if self.glued else f"{self.given} {self.family}"

    @property
    def ordinary(self) -> bool:
        """Whether a part of it is a word of the course, too."""
        return bool({plain(self.given), plain(self.family)} & _ORDINARY)

    @property
    def short(self) -> bool:
        """Whether a part alone is too short to mean anybody."""
        return min(len(plain(self.given)), len(plain(self.family))) < 3


@dataclass(frozen=True, slots=True)
class Line:
    """`before` + `mention` + `after`; without a mention all of it is `before`."""

    before: str
    mention: str = ""
    after: str = ""
    form: str = ""
    who: Person | None = None

    @property
    def text(self) -> str:
        """As it stands in the file."""
        return self.before + self.mention + self.after


def plain(text: str) -> str:
    """Small ASCII letters, as logins have them; other scripts as they are."""
    text = text.translate(str.maketrans("łŁøØđĐı", "lLoOdDi")).replace("ß", "ss")
    text = unicodedata.normalize("NFKD", text).casefold()
    return unicodedata.normalize("NFC", "".join(letter for letter in text if letter.isalpha()))


def people(source: str, count: int, rng: random.Random) -> list[Person]:
    """So many different persons: the listed ones, then their given names with others' family names."""
    listed = [entry.split("|") for entry in source.replace("\n", "").split(";")]
    pairs = [(names[0], names[1], len(names) > 2) for names in listed]
    western = [(given, family) for given, family, glued in pairs if not glued]
    seen = {(given, family) for given, family, _ in pairs}
    made = [
        Person(family, given, True, 0) if glued else Person(given, family, False, 0) for given, family, glued in pairs
    ]
    while len(made) < count:
        given, family = rng.choice(western)[0], rng.choice(western)[1]
        if (given, family) not in seen and plain(given) != plain(family):
            seen.add((given, family))
            made.append(Person(given, family, False, 0))
    rng.shuffle(made)
    return [Person(one.given, one.family, one.glued, 48_101 + 7 * n) for n, one in enumerate(made[:count])]


def file_name(one: Person, moodle: bool, suffix: str, rng: random.Random) -> str:
    """As the LMS hands the work out."""
    if moodle:
        shown = one.full if one.glued or rng.random() < 0.7 else f"{one.family} {one.given}"
        return f"{shown}_{one.number}_assignsubmission_file_"
    joined = "".join(letter for letter in f"{one.family}{one.given}".lower() if letter.isalnum())
    late = "_LATE" if rng.random() < 0.1 else ""
    return (
        f"{joined if rng.random() < 0.5 else plain(joined)}{late}_{one.number}_{900_000 + one.number}_homework4{suffix}"
    )


# --- mentions


def written(one: Person, rng: random.Random) -> tuple[str, str]:
    """(given, family) in one of the spellings that are met: accents kept, decomposed, left out, written as digraphs."""
    how = rng.randrange(6)
    if how == 0:
        return unicodedata.normalize("NFD", one.given), unicodedata.normalize("NFD", one.family)
    if how == 1:
        umlauts = str.maketrans(
            {"ä": "ae", "ö": "oe", "ü": "ue", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "ø": "oe", "Ø": "Oe"}
        )
        return one.given.translate(umlauts), one.family.translate(umlauts)
    if how == 2:
        strip = re.compile("[\u0300-\u036f]")
        bare = (strip.sub("", unicodedata.normalize("NFKD", part)) for part in (one.given, one.family))
        return tuple(unicodedata.normalize("NFC", part) for part in bare)  # type: ignore[return-value]
    if how == 3:
        return one.given.replace("'", "’"), one.family.replace("'", "’")
    return one.given, one.family


_GAPS = {
    "space": " ",
    "no-break space": "\u00a0",
    "thin space": "\u2009",
    "tab": "\t",
    "two spaces": "  ",
    "line break": "\n",
    "commented line break": "\n# ",
    "bold family": " **",
    "html": " <b>",
    "nbsp": "&nbsp;",
    "escaped underscore": "\\_",
    "percent": "%20",
    "break": "<br/>",
    "zero width": "\u200b ",
    "escaped no-break": "\\u00a0",
}
_CLOSING = {"bold family": "**", "html": "</b>"}


def prose_mention(one: Person, rng: random.Random) -> tuple[str, str]:
    """(form, text): the name as people write it out."""
    given, family = written(one, rng)
    if one.glued:
        form, text = rng.choice(
            [("glued", given_family) for given_family in (family + given,)] + [("spaced", f"{family} {given}")]
        )
        return f"cjk {form}", text
    kinds = ["full", "full", "gap", "gap", "sorted", "upper", "possessive"]
    kinds += [] if one.ordinary else ["lower", "initial", "initial", "sorted initial", "family last", "last initial"]
    kind = rng.choice(kinds)
    if kind == "gap":
        gap = rng.choice(sorted(_GAPS))
        return f"gap: {gap}", f"{given}{_GAPS[gap]}{family}{_CLOSING.get(gap, '')}"
    first, last = _initial(given), _initial(family)
    texts = {
        "full": f"{given} {family}",
        "sorted": f"{family}, {given}",
        "upper": f"{given} {family.upper()}" if not one.ordinary else f"{given} {family}",
        "possessive": f"{given} {family}'s",
        "lower": f"{given} {family}".lower(),
        "initial": f"{first}. {family}",
        "sorted initial": f"{family}, {first}.",
        "family last": f"{family} {given}",
        "last initial": f"{given} {last}.",
    }
    return (kind, texts[kind]) if not (one.short and "initial" in kind) else ("full", texts["full"])


def _initial(part: str) -> str:
    return unicodedata.normalize("NFC", part)[0].upper()


def login_mention(one: Person, rng: random.Random) -> tuple[str, str]:
    """(form, text): the name as accounts and tools write it, in one word."""
    given, family = plain(one.given), plain(one.family)
    if not (given + family).isascii():
        return "login cjk", f"{one.family}{one.given}"
    forms = {
        "given.family": f"{given}.{family}",
        "given_family": f"{given}_{family}",
        "family-given": f"{family}-{given}",
        "givenfamily": given + family,
        "familygiven": family + given,
        "Camel": given.capitalize() + family.capitalize(),
        "camel": given + family.capitalize(),
        "digits": f"{given}{family}{rng.randrange(1, 99)}",
    }
    if not one.short and not one.ordinary:
        forms |= {
            "initial+family": given[0] + family,
            "family+initial": family + given[0],
            "family": family,
            "given": given,
        }
        forms |= {
            "initial.family": f"{given[0]}.{family}",
            "initial+digits": f"{given[0]}{family}{rng.randrange(1, 99):02d}",
        }
    return _picked(forms, rng)


def _picked(forms: dict[str, str], rng: random.Random) -> tuple[str, str]:
    form = rng.choice(sorted(forms))
    return f"login {form}", forms[form]


_PROSE_FRAMES = [
    ("Author: ", ""),
    ("by ", ""),
    ("Name: ", ""),
    ("Submitted by ", " on 3 May"),
    ("", ""),
    ("# ", ""),
    ("Worked together with ", "."),
    ("Thanks to ", " for the idea with the join."),
    ("Group: ", " and one more"),
    ('author = "', '"'),
    ('{"author": "', '", "year": 2026}'),
    ("*", "*"),
    ("© 2026 ", ""),
    ("@author ", ""),
    ("As ", " showed in class, the join is wrong."),
    ("<!-- ", " -->"),
    ("| ", " | 10 |"),
    ("I talked with ", " about it, and the mean is the same"),
    ("Homework 4 (", ")"),
    ("> ", " wrote this part"),
]
_LOGIN_FRAMES = [
    ("/Users/", "/Documents/stats/hw4.R"),
    ("setwd('/home/", "/hw4')"),
    ("C:\\Users\\", "\\Desktop\\hw4"),
    ("C:\\\\Users\\\\", "\\\\hw4"),
    ('File "/Users/', '/anaconda3/lib/python3.11/site-packages/x.py", line 3, in <module>'),
    ("origin  git@github.com:", "/hw4.git (fetch)"),
    ("https://github.com/", "/stats-hw4"),
    ("https://gitlab.example.org/", "/hw4/-/tree/main"),
    ("", "@uni.example"),
    ("<", "@students.example.edu>"),
    ("mailto:", "@uni.example"),
    ("Error in file('/home/", "/data.csv'): cannot open the connection"),
    ("", "@cluster:~$ Rscript hw4.R"),
    ("login: ", ""),
    ("https://rpubs.com/", "/hw4"),
    ("/mnt/c/Users/", "/hw4.ipynb"),
    ("file:///home/", "/hw4.html"),
    ("~", "/hw4/data.csv"),
]


def mention(one: Person, rng: random.Random) -> Line:
    """A line that names somebody."""
    if rng.random() < 0.45:
        form, text = login_mention(one, rng)
        before, after = rng.choice(_LOGIN_FRAMES)
        return Line(before, text, after, form, one)
    form, text = prose_mention(one, rng)
    before, after = rng.choice(_PROSE_FRAMES)
    return Line(before, text, after, form, one)


# --- submissions


def submission_lines(one: Person, others: Sequence[Person], suffix: str, rng: random.Random) -> list[Line]:
    """A page of prose and code with mentions in it, three of four the author's own."""
    lines = [Line(text) for text in rng.sample(_PROSE.splitlines(), 9)]
    lines += [Line(text) for text in _CODE["py" if suffix in (".py", ".ipynb") else "r"].splitlines()]
    for _ in range(MENTIONS_EACH):
        who = one if rng.random() < 0.75 else rng.choice(others)
        lines.insert(rng.randrange(len(lines) + 1), mention(who, rng))
    return lines


def save(path: Path, lines: Sequence[Line], one: Person) -> None:
    """Write them as a file of this kind, each line between marks that stay what they are."""
    texts = [f"<<{number}:{line.text}:{number}>>" for number, line in enumerate(lines)]
    if path.suffix != ".ipynb":
        header = f'---\ntitle: "Homework"\nauthor: "{one.full}"\n---\n' if path.suffix in (".Rmd", ".md") else ""
        path.write_text(header + "\n".join(texts) + "\n", "utf-8")
        return
    cells = [{"cell_type": "markdown", "metadata": {"author": one.full}, "source": text} for text in texts[::2]]
    for text in texts[1::2]:
        shown = {"output_type": "stream", "name": "stdout", "text": [text + "\n"]}
        cells.append({"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "", "outputs": [shown]})
    notebook = {"cells": cells, "metadata": {"authors": [{"name": one.full}]}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook, ensure_ascii=rng_free(one)), "utf-8")


def rng_free(one: Person) -> bool:
    """Every second notebook has its letters escaped, as json.dump does."""
    return one.number % 2 == 0


def write_class(folder: Path, source: str, count: int, rng: random.Random) -> dict[str, list[Line]]:
    """A class on disk; what each submission's lines are, by its name."""
    made = people(source, count, rng)
    written_lines = {}
    for place, one in enumerate(made):
        suffix = rng.choice([".R", ".py", ".Rmd", ".md", ".ipynb", ".ipynb"])
        lines = submission_lines(one, made, suffix, rng)
        name = file_name(one, place % 2 == 0, suffix, rng)
        target = folder / name / f"work{suffix}" if place % 2 == 0 else folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        save(target, lines, one)
        written_lines[name] = lines
    return written_lines


# --- what came of it


@dataclass(slots=True)
class Tally:
    """Counts over a class."""

    planted: Counter[str]
    found: Counter[str]
    words: int = 0
    changed: int = 0


def look(before: dict[str, list[Line]], after: dict[str, str], show: int) -> Tally:
    """Compare each line with what became of it."""
    tally, missed = Tally(Counter(), Counter()), 0
    for name, lines in before.items():
        for number, line in enumerate(lines):
            found = re.search(f"<<{number}:(.*?):{number}>>", after[name], re.DOTALL)
            now = found[1] if found else ""
            wrong = _count(line, now, tally)
            if wrong and missed < show:
                missed += 1
                print(f"  {wrong:8} {name}: {line.text!r} -> {now!r}", file=sys.stderr)
    return tally


def _count(line: Line, now: str, tally: Tally) -> str:
    words = [*_words(line.before), *_words(line.after)]
    left = Counter(_words(now))
    lost = sum((Counter(words) - left).values())
    tally.words += len(words)
    tally.changed += lost
    if not line.who:
        return "changed" if lost else ""
    middle = now.removeprefix(line.before).removesuffix(line.after) if not lost else now
    tally.planted[line.form] += 1
    found = "student-" in now and not (_parts(line) & set(_pieces(middle)))
    tally.found[line.form] += found
    return "" if found and not lost else "missed" if not found else "changed"


def _parts(line: Line) -> set[str]:
    """The letters of the mention's words of two and more: none may be left."""
    return {piece for piece in _pieces(line.mention) if len(piece) > 1 or not piece.isascii()}


def _pieces(text: str) -> Iterator[str]:
    marks = "\u0300-\u036f"
    text = re.sub(r"student-[0-9a-f]{10}", " ", text)
    return (
        plain(piece) for piece in re.findall(rf"(?:[^\W\d_]|[{marks}])+", re.sub(r"<\w+/?>|&nbsp;|\\u00a0", " ", text))
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def names_only(rng: random.Random) -> float:
    """Processor seconds, as the docstring above says."""
    given = [name.partition("|")[0] for name in NAMES.replace("\n", "").split(";")]
    pairs = itertools.islice(itertools.permutations(filter(str.isascii, given), 2), SUBMISSIONS)
    kin = [Person(" ".join(pair), "Wolkenstein", False, 48_101 + number) for number, pair in enumerate(pairs)]

    def seconds(text: str) -> float:
        texts = [text, *[""] * (len(kin) - 1)]
        made = [
            Submission(file_name(one, True, "", rng), "R", (SubmissionPart("output", each, "output"),))
            for one, each in zip(kin, texts, strict=True)
        ]
        began = time.process_time()
        pseudonymise(made, b"benchmark")
        return time.process_time() - began

    mentions = (rng.choice((prose_mention, login_mention))(rng.choice(kin), rng)[1] for _ in range(LARGEST // 12))
    text = " ".join(mentions)[:LARGEST]
    alone = seconds("")
    return seconds(text) - alone


def main() -> None:
    """Make the class, replace its names, and look at what is left."""
    parser = harness.parser(__doc__)
    parser.add_argument("--held-out", action="store_true", help="names that the replacing was not tuned with")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print so many lines that went wrong")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    count = QUICK_SUBMISSIONS if given.quick else SUBMISSIONS
    with tempfile.TemporaryDirectory(prefix="kvasir-names-") as folder:
        before = write_class(Path(folder), HELD_OUT if given.held_out else NAMES, count, rng)
        read = read_submissions(Path(folder))
    started = time.perf_counter()
    done = pseudonymise(read, b"benchmark")
    seconds = time.perf_counter() - started
    after = {one.name: "\n".join(part.text for part in one.parts) for one in done}
    tally = look(before, after, given.show)
    report(tally)
    planted, found = tally.planted.total(), tally.found.total()
    harness.finish(
        planted=planted,
        found=found,
        found_share=found / planted,
        changed_other_share=tally.changed / tally.words,
        other_words=tally.words,
        seconds=seconds,
        names_only_seconds=names_only(rng),
        held_out=given.held_out,
    )
    if found < FOUND_AT_LEAST * planted or tally.changed > CHANGED_AT_MOST * tally.words:
        sys.exit(1)


def report(tally: Tally) -> None:
    """A row for each form, the worst first."""
    shares: dict[float, list[str]] = defaultdict(list)
    for form, planted in tally.planted.items():
        shares[tally.found[form] / planted].append(f"{form:28} {tally.found[form]:4} of {planted}")
    for share in sorted(shares):
        print("\n".join(sorted(shares[share])))
    print(f"{tally.found.total():,} of {tally.planted.total():,} mentions found")
    print(f"{tally.changed:,} of {tally.words:,} other words changed")


if __name__ == "__main__":
    main()
