"""Finds a class's names in a text. `grading.names.pseudonyms` says what is searched for, and why."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import PurePosixPath
from typing import Literal

from grading.letters import (
    CJK,
    GAP,
    GAP_CHARS,
    NARROW,
    PARTICLES,
    WORD,
    letters,
    without_digraphs,
    without_markup,
)
from grading.names.common_words import COMMON_WORDS
from grading.submissions.reading import Submission
from producers.batch.forms import ANY_SPELLING, PROMPT_FORM

# Minimum number of letters in a whole name. A shorter name counts only if it is written like a name.
MIN_LETTERS = 5
MAX_WORDS = 6
# A name with more letters than this is recognised only if the whole name occurs.
_MAX_LETTERS = 60
_MAX_WORD = 200
_MIN_LABEL = 4  # a shorter gap between two words has no room for a label such as "name"

_MACHINES = frozenset(
    """
    admin content data git guest home info jovyan local mail noreply public root rstudio runner share shared staff
    student students temp test ubuntu user users
    """.split()  # noqa: SIM905  as the next table of words
)
_ACCOUNT_NAME = r"(?P<who>[^\W_](?:[\w.+'-]|%[0-9A-Fa-f]{2}){0,80})"
_MAIL = re.compile(rf"(?<![\w.+'%-]){_ACCOUNT_NAME}(?=@[\w-]{{1,60}}[.:])")
_ACCOUNT = re.compile(
    r"(?i)(?:[/\\](?:users?|home\d?|homes|u|scratch|profiles|people|staff|students?)(?:[/\\]{1,2}|%2f)"
    r"|(?:github|gitlab|bitbucket|rpubs|kaggle|huggingface|codeberg)[\w.-]{0,40}[/:](?:~|users/)?|(?<![\w/])~(?=[\w.-]{1,80}/))"
    + _ACCOUNT_NAME
)
_LOGIN = re.compile(
    r"""(?i)\b(?:login|user|username|userid|netid|account|logname|owner|author)["']?\s{0,2}[:=]\s{0,2}["']?"""
    + _ACCOUNT_NAME
)
_LABEL = (
    r"(?i:(?:\b(?:authors?|names?|students?|by|group|team|partners?|with|thanks to|signed|maintainer)|©[ \d]*)"
    r"\W{0,8})\Z"
)
_AUTHOR = re.compile(_LABEL)
_AUTHOR_OR_START = re.compile(rf"""(?:\A|\n|[#>|*/]\s)[\s#/*>%"'|<!-]*\Z|{_LABEL}""")
_BEFORE = re.compile(r"(?<![^\W_])([^\W\d_])[\u0300-\u036f]?\.?(?:[ -]?[^\W\d_]\.){0,2}[ \u00a0]{0,2}\Z")
_AFTER = re.compile(r"(?:,?[ \u00a0]{1,2}|,)([^\W\d_])[\u0300-\u036f]?\.")
_OLD_BETWEEN = re.compile(r"[ \t,._'’\-]{0,3}")

# Start and end of a name, and the text that replaces it.
_Span = tuple[int, int, str]
# The start and end of each word in a run. A run is a few neighbouring words that can form a name.
_Run = tuple[tuple[int, int], ...]
_Kind = Literal["part", "login"]
# What a word must have beside it to count as a person's name.
_Needs = Literal["nothing", "a mark", "a label", "the initial"]


@dataclass(eq=False, slots=True)
class Student:
    """What is known about one student's name."""

    stand_in: str
    platform_name: str  # the name as the learning platform writes it
    number: str = ""  # the student's id in the learning platform
    parts: set[tuple[str, str]] = field(default_factory=set)  # pairs of family and given name, in both orders
    of_words: bool = False  # whether each word of the name is a common word
    is_ambiguous: bool = False  # whether each word of the name is a common word, or the name is short
    is_whole: bool = False  # whether the name is the name of a file; then only the whole name means the student

    @property
    def wholes(self) -> set[str]:
        """All letters of the name in order, in both spellings.

        For a name of three or more words, each pair of words is included too.
        """
        return {*_spellings(letters(self.platform_name)), *(first + second for first, second in self.parts)}

    def guesses(self) -> set[tuple[str, str]]:
        """Return possible splits into family name and given name, if nothing says where the family name ends."""
        spellings = self.wholes if not (self.parts or self.is_whole) else ()
        return {(spelling[:cut], spelling[cut:]) for spelling in spellings for cut in range(2, len(spelling) - 1)}


@dataclass(frozen=True, slots=True)
class _Form:
    """One way in which some letters may mean a student."""

    kind: _Kind
    student: Student
    initial: str = ""  # if the letters are one part of the name, the initial of the other part
    sure: bool = True


@dataclass(frozen=True, slots=True)
class _Meaning:
    """Which student a part of a name may mean in one text, and under which condition."""

    kind: _Kind
    initial: str
    needs: _Needs
    stand_in: str


@dataclass(frozen=True, slots=True)
class _PartialMeanings:
    """Everything that the same letters may mean in one text, in the order in which it is tried.

    Without this, a family name that many students share would be checked once for each of them wherever it occurs.
    """

    meanings: list[_Meaning]
    without_initials: list[_Meaning]  # the meanings of the word if no known initial stands beside it
    common: bool

    def with_initials(self, initials: Collection[str]) -> list[_Meaning]:
        """Return what the letters mean beside these initials."""
        # A label can show that the common word after it is a name. An initial beside the word does not show this.
        if self.common:
            return self.meanings
        return [meaning for meaning in self.meanings if meaning.initial in initials] or self.without_initials


def student_called(platform_name: str, stand_in: str, number: str = "", words: Sequence[str] = ()) -> Student:
    """Make a student with this name. `words` are the words of the name, if the platform keeps them apart."""
    student = Student(stand_in, platform_name, number)
    for spell in (str, without_digraphs) if len(words) > 1 else ():
        parts = [spell(letters(word)) for word in words]
        student.parts |= {("".join(parts[cut:]), "".join(parts[:cut])) for cut in range(1, len(parts))}
        longer = [part for part in parts if len(part) > 2 and part not in COMMON_WORDS] if len(parts) > 2 else []
        student.parts |= {(first, second) for first in longer for second in longer if first != second}
        student.parts |= {(given_name, family_name) for family_name, given_name in student.parts}
    return student


class Names:
    """The names of a class, and a search for them in texts."""

    def __init__(self, students: list[Student], form: int = PROMPT_FORM) -> None:
        self.students = students
        self._old = form < ANY_SPELLING
        self._in_use: set[str] = set()  # parts of names that other students use as ordinary words
        self._index()

    def learn(self, submissions: Sequence[Submission], authors: Sequence[Student | None]) -> list[set[Student]]:
        """Search the class's work for names written as separate words, and for parts of names that are ordinary words.

        Returns, for each submission, the students whose whole name occurs in it, including the author.
        """
        writers: defaultdict[str, set[int]] = defaultdict(set)
        present: list[set[Student]] = [{author} if author else set() for author in authors]
        for index, (submission, author) in enumerate(zip(submissions, authors, strict=True)) if not self._old else ():
            for text in (
                PurePosixPath(submission.name).name,
                *(without_markup(part.text) for part in submission.parts),
            ):
                words, wholes_of = self._words(text), self._wholes_in(author, set())
                seen_keys: set[tuple[object, ...]] = set()
                for spelling, run in self._runs(text, words, self._wholes):
                    run_words = [words[text[start:end]] for start, end in run]
                    for students in wholes_of(spelling):
                        key = (students[0], *run_words)
                        if key not in seen_keys and self._is_whole(students[0], text, run, author):
                            seen_keys.add(key)
                            present[index].update(students)
                            _note_parts(students, spelling, run_words)
                for part in set(words.values()):
                    writers[part].add(index)
        self._index()
        self._in_use = {
            part for part, writer_indices in writers.items() if self._is_in_use(part, writer_indices, present)
        }
        return present

    def replace_names(self, text: str, author: Student | None, present: set[Student]) -> str:
        """Return the text with all names replaced."""
        # For each start position, the longest span that begins there. Of two equally long spans, the first one counts.
        longest: dict[int, _Span] = {}
        for span in self._find_spans(text if self._old else without_markup(text), author, present):
            longest_span = longest.setdefault(span[0], span)
            if span[1] > longest_span[1]:
                longest[span[0]] = span
        pieces, cursor = [], 0
        for start in sorted(longest):
            if start >= cursor:
                _, end, stand_in = longest[start]
                pieces += [text[cursor:start], stand_in]
                cursor = end
        return "".join([*pieces, text[cursor:]]) if pieces else text

    # --- index of spellings

    def _index(self) -> None:
        """Build `_wholes` and `_forms` (what letters mean) and `_prefixes` (the beginnings of all whole names)."""
        self._wholes: dict[str, list[Student]] = {}
        self._forms: dict[str, list[_Form]] = {}
        self._prefixes: set[str] = set()
        for student in self.students:
            short = all(len(spelling) < MIN_LETTERS and spelling.isascii() for spelling in student.wholes)
            student.of_words = _made_of_words(student)
            student.is_ambiguous = short or student.of_words
            wholes = {letters(student.platform_name)} if self._old else student.wholes
            for spelling in sorted(wholes):
                ring = spelling + spelling[:-1]
                for turn in range(len(spelling) if len(spelling) <= _MAX_LETTERS else 0):
                    self._wholes.setdefault(ring[turn : turn + len(spelling)], []).append(student)
                    self._prefixes.update(itertools.accumulate(ring[turn : turn + len(spelling)]))
                self._wholes.setdefault(spelling, []).append(student)
        self._cjk_names = {
            spelling: students[0] for spelling, students in self._wholes.items() if CJK.fullmatch(spelling)
        }
        for student in self.students:
            for pair in () if self._old else sorted(student.parts):
                self._add_parts(student, *pair, sure=True)
            for pair in () if self._old else sorted(student.guesses()):
                self._add_parts(student, *pair, sure=False)
        self._all_spellings = self._wholes.keys() | self._forms.keys()

    def _add_parts(self, student: Student, first: str, second: str, sure: bool) -> None:
        for part, counterpart in ((first, second), (second, first)):
            self._forms.setdefault(part, []).append(_Form("part", student, counterpart[0], sure))
            for login in (counterpart[0] + part, part + counterpart[0], counterpart[0] + part[:7]):
                self._forms.setdefault(login, []).append(_Form("login", student, sure=sure))

    def _is_in_use(self, part: str, writer_indices: set[int], present: Sequence[set[Student]]) -> bool:
        """Whether enough submissions use this word without having a student of that name in them.

        Enough means at least one in fifty submissions, and at least one.
        """
        students = {form.student for form in self._forms.get(part, ()) if form.kind == "part"}
        outsider_count = sum(not (students & present[index]) for index in writer_indices) if students else 0
        return outsider_count > 0 and outsider_count * 50 >= len(present)

    def _wholes_in(self, author: Student | None, present: set[Student]) -> Callable[[str], list[list[Student]]]:
        """Return a function that finds the students with a whole name.

        Students with the same conditions are grouped.
        """

        @cache
        def wholes(spelling: str) -> list[list[Student]]:
            alike: dict[tuple[object, ...], list[Student]] = {}
            for student in self._wholes.get(spelling, ()):
                traits = (
                    student is author,
                    student in present,
                    student.is_ambiguous,
                    student.of_words,
                    self._old and student,
                )
                alike.setdefault(traits, []).append(student)
            return list(alike.values())

        return wholes

    def _partial_meanings_in(self, author: Student | None, present: set[Student]) -> Callable[[str], _PartialMeanings]:
        """Return a function that finds what letters may mean in one text if they are only a part of a name."""

        @cache
        def partial_meanings(spelling: str) -> _PartialMeanings:
            common = self._is_common(spelling)
            meanings: dict[tuple[str, ...], _Meaning] = {}
            alone: dict[tuple[str, ...], _Meaning] = {}
            for form in self._forms.get(spelling, ()):
                is_author, is_present = form.student is author, form.student in present
                needs = _needs(form, spelling, is_author, is_present, common)
                if needs and (form.kind, form.initial, needs) not in meanings:
                    meaning = _Meaning(form.kind, form.initial, needs, form.student.stand_in)
                    meanings[form.kind, form.initial, needs] = meaning
                    if needs != "the initial":
                        alone.setdefault((form.kind, needs), meaning)
            return _PartialMeanings([*meanings.values()], [*alone.values()], common)

        return partial_meanings

    # --- positions in a text

    def _words(self, text: str) -> dict[str, str]:
        """Return the words of a text that may belong to a name, with their letters."""
        spellings = {}
        for word in set(WORD.findall(text)):
            spelling = letters(word) if len(word) <= _MAX_WORD else ""
            short = without_digraphs(spelling)
            if spelling in self._all_spellings:
                spellings[word] = spelling
            elif short in self._all_spellings or short in self._prefixes:
                spellings[word] = short
            elif spelling in self._prefixes:
                spellings[word] = spelling
        return spellings

    def _runs(self, text: str, words: Mapping[str, str], spellings: Container[str]) -> Iterator[tuple[str, _Run]]:
        """Yield all runs of words whose letters form one of `spellings`, with their positions."""
        prefixes = self._prefixes
        runs: list[tuple[str, _Run]] = []  # the runs that end at the previous word
        end = 0
        # If only single letters were found, they are ignored, because every text has some, and no name consists only of
        # them.
        for match in WORD.finditer(text) if any(len(word) > 1 or not word.isascii() for word in words.values()) else ():
            spelling = words.get(match[0])
            if spelling is None:
                continue
            word_span = match.span()
            runs = [
                (longer, (*run, word_span))
                for prefix, run in runs
                if (longer := prefix + spelling) in prefixes and len(run) < MAX_WORDS
            ]
            if runs and not self._is_gap(text, end, word_span[0]):
                runs = []
            runs.append((spelling, (word_span,)))
            end = word_span[1]
            for candidate in runs:
                if candidate[0] in spellings:
                    yield candidate

    def _is_gap(self, text: str, start: int, end: int) -> bool:
        """Whether the text between two words may stand inside a name."""
        if end - start < _MIN_LABEL:
            return _is_short_gap(text[start:end], self._old)
        between = _OLD_BETWEEN if self._old else GAP
        return end - start <= GAP_CHARS and between.fullmatch(text, start, end) is not None

    def _find_spans(self, text: str, author: Student | None, present: set[Student]) -> Iterator[_Span]:
        wholes_of, meanings_of = self._wholes_in(author, present), self._partial_meanings_in(author, present)
        for spelling, run in self._runs(text, self._words(text), self._all_spellings):
            for whole, *_ in wholes_of(spelling):
                if self._is_whole(whole, text, run, author):
                    yield run[0][0], _after_numbers(whole, text, run[-1][1]), whole.stand_in
                    break
            else:
                if (partial_meanings := meanings_of(spelling)).meanings and (
                    part := self._part(partial_meanings, text, run)
                ):
                    yield part
        if self._old:
            return
        yield from self._cjk_spans(text)
        yield from self._account_spans(text, cache(lambda spelling: self._account(spelling, author, present)))
        if author and len(author.number) >= MIN_LETTERS:
            number = re.compile(rf"(?<![\w.]){author.number}(?![^\W_]|\.\d)")
            yield from ((*match.span(), author.stand_in) for match in number.finditer(text))

    def _is_whole(self, student: Student, text: str, run: _Run, author: Student | None) -> bool:
        """Whether a run of words with the letters of a name really is that name."""
        if self._old:
            return _is_whole_in_order(student, [text[start:end] for start, end in run])
        of_words = student.of_words or _are_common(text, run)
        if not (of_words or student.is_ambiguous):
            return True
        words = [text[start:end] for start, end in run]
        if not all(map(str.isascii, map(letters, words))):
            return True
        if len(words) == 1:
            return not of_words and words[0][0].isupper() and sum(map(str.isupper, words[0])) == 2
        gaps = [text[end:start] for (_, end), (start, _) in itertools.pairwise(run)]
        if not all(NARROW.fullmatch(gap) for gap in gaps):
            return False
        # "Min, Max, Mean" is a list of functions, but "by Mean, Max" names an author.
        is_list = of_words and any("," in gap for gap in gaps)
        if is_list and not _AUTHOR_OR_START.search(text[max(0, run[0][0] - 60) : run[0][0]]):
            return False
        if all(word[0].isupper() or word in PARTICLES for word in words):
            return not (of_words and all(word.isupper() for word in words))
        return student is author and not of_words and all(gap.isspace() for gap in gaps)

    def _part(self, partial_meanings: _PartialMeanings, text: str, run: _Run) -> _Span | None:
        """Return where a part of a name means a student.

        It does so beside the other part's initial, by itself, or as an account's name.
        """
        start, end = run[0][0], run[-1][1]
        is_lower = text[start].islower() and all(text[first].islower() for first, _ in run[1:])
        if len(run) > 1 and (is_lower or _are_common(text, run)):
            return None
        initials = {} if is_lower else _initials(text, start, end)
        best = None
        for meaning in partial_meanings.with_initials(initials) if initials else partial_meanings.without_initials:
            first, last = start, end
            if meaning.kind == "login":
                neighbours = text[start - 1 : start] + text[end : end + 1]
                has_mark = any(mark in "/\\@0123456789" for mark in neighbours)
                is_meant = len(run) == 1 and (meaning.needs == "nothing" or has_mark)
            elif is_lower:
                continue
            else:
                if initials:
                    first, last = initials.get(meaning.initial, (start, end))
                is_meant = meaning.needs == "nothing" or (meaning.initial in initials and not partial_meanings.common)
                if not is_meant and meaning.needs == "a label":
                    is_meant = _AUTHOR.search(text[max(0, first - 40) : first]) is not None
            if is_meant and (not best or last - first > best[1] - best[0]):
                best = first, last, meaning.stand_in
        return best

    def _is_common(self, spelling: str) -> bool:
        return spelling in COMMON_WORDS or spelling in self._in_use

    def _cjk_spans(self, text: str) -> Iterator[_Span]:
        """Find names in scripts without spaces, inside longer runs of letters."""
        firsts = {name[0] for name in self._cjk_names}
        sizes = sorted({len(name) for name in self._cjk_names}, reverse=True)
        for match in CJK.finditer(text) if firsts else ():
            places = [place for place in range(*match.span()) if text[place].isalpha()]
            compact_text = "".join((letters(text[place]) or "?")[0] for place in places)
            for at in (at for at, letter in enumerate(compact_text) if letter in firsts):
                for size in (size for size in sizes if at + size <= len(places)):
                    student = self._cjk_names.get(compact_text[at : at + size])
                    if student and (size > 2 or _stands_out(compact_text, at, at + size)):
                        yield places[at], places[at + size - 1] + 1, student.stand_in

    def _account_spans(self, text: str, account: Callable[[str], Student | None]) -> Iterator[_Span]:
        """Find names where account names stand: before an @, in a folder of homes, or after a code host's address."""
        for match in itertools.chain(*(pattern.finditer(text) for pattern in (_MAIL, _ACCOUNT, _LOGIN))):
            start, _ = match.span("who")
            words = [word for word, _ in zip(WORD.finditer(match["who"]), range(4), strict=False)]
            for count in range(len(words), 0, -1):
                spelling = "".join(letters(word[0]) for word in words[:count])
                end = words[count - 1].end()
                student = account(spelling)
                if student and not (match.re is _LOGIN and self._is_common(spelling)):
                    digits = re.compile(r"\d*").match(match["who"], end)
                    yield start + words[0].start(), start + (digits.end() if digits else end), student.stand_in
                    break

    def _account(self, spelling: str, author: Student | None, present: set[Student]) -> Student | None:
        if spelling in _MACHINES or len(spelling) < 2:
            return None
        wholes, forms = self._wholes.get(spelling, ()), self._forms.get(spelling, ())
        is_own = any(form.student is author and (form.sure or len(spelling) > 2) for form in forms)
        if author in wholes or is_own:
            return author
        other_students = (form.student for form in forms if self._is_others(form, spelling, present))
        return next(itertools.chain(wholes, other_students), None)

    def _is_others(self, form: _Form, spelling: str, present: set[Student]) -> bool:
        if not form.sure:
            return form.kind == "login" and len(spelling) >= MIN_LETTERS and not self._is_common(spelling)
        return form.student in present or (len(spelling) > 2 and not self._is_common(spelling))


@lru_cache(maxsize=1 << 12)
def _is_short_gap(between: str, old: bool) -> bool:
    return (_OLD_BETWEEN if old else GAP).fullmatch(between) is not None


def _note_parts(students: Sequence[Student], spelling: str, words: Sequence[str]) -> None:
    """Record where the family name ends in a name that Canvas wrote as one word, once somebody wrote it as several."""
    cuts = list(itertools.accumulate(map(len, words[:-1])))
    for student in students:
        for way in _spellings(letters(student.platform_name)):
            turn = (way + way).find(spelling)
            ends = [turn] if len(spelling) - turn in cuts else cuts if turn == 0 and len(cuts) == 1 else []
            new = {(way[:end], way[end:]) for end in ends} - student.parts
            if new and not student.is_whole:
                student.parts |= new
                student.of_words = _made_of_words(student)


def _spellings(name_letters: str) -> list[str]:
    short = without_digraphs(name_letters)
    return [name_letters] if short == name_letters else [name_letters, short]


def _made_of_words(student: Student) -> bool:
    pairs = student.parts or student.guesses()
    return any(first in COMMON_WORDS and second in COMMON_WORDS for first, second in pairs)


def _is_whole_in_order(student: Student, words: Sequence[str]) -> bool:
    rotations = ("".join(map(letters, [*words[turn:], *words[:turn]])) for turn in range(len(words)))
    return letters(student.platform_name) in rotations and len(letters(student.platform_name)) >= MIN_LETTERS


def _are_common(text: str, run: _Run) -> bool:
    for start, end in run:
        spelling = letters(text[start:end])
        if len(spelling) != 1 and spelling not in COMMON_WORDS:
            return False
    return not any(text[start:end] in PARTICLES for start, end in run[:-1])


def _initials(text: str, start: int, end: int) -> dict[str, tuple[int, int]]:
    """Return the initials that stand beside a run of words, with the span of both."""
    initials = {}
    after = _AFTER.match(text, end) if "." in text[end : end + 6] else None
    if after and after[1].isupper():
        initials[letters(after[1])] = start, after.end()
    near = text[max(0, start - 9) : start]
    before = _BEFORE.search(near) if near[-1:] in (".", " ", "\u00a0") and not near[-2:-1].islower() else None
    if before and before[1].isupper():
        initials[letters(before[1])] = start - len(before[0]), end
    return initials


def _shortest(form: _Form, is_author: bool, is_present: bool) -> int:
    """Return how many letters a part of a name, or an account's name, needs at least to mean the student."""
    if form.kind == "login":
        return MIN_LETTERS
    return (2 if is_present else 3) if form.sure else (3 if is_author else 5)


def _needs(form: _Form, spelling: str, is_author: bool, is_present: bool, common: bool) -> _Needs | None:
    """Return what must stand beside letters so that they mean this student in one text; None if nothing would do."""
    if len(spelling) < _shortest(form, is_author, is_present) or (common and not (is_author and form.kind == "part")):
        return None
    if form.kind == "login":
        return ("nothing" if is_present else None) if form.sure else "a mark" if is_author else None
    if is_present and not common and len(spelling) > 2 and not form.student.is_ambiguous and (is_author or form.sure):
        return "nothing"
    return "a label" if is_author else "the initial"


def _after_numbers(student: Student, text: str, end: int) -> int:
    """Return where the platform's numbers after a name end, because file names contain both."""
    if not student.number or text[end : end + 1] != "_":
        return end
    match = re.compile(rf"(?:_LATE)?_{student.number}(?:_\d+)?").match(text, end)
    return match.end() if match else end


def _stands_out(compact_text: str, start: int, end: int) -> bool:
    """Whether two letters of a name stand as a separate word, judged by the characters before and after them."""
    before, after = compact_text[max(0, start - 1) : start], compact_text[end : end + 1]
    return before in "者名生是由和与跟及我叫给谢：" and after in "的和与及在是同老君说写做、さんはがのと은는이가의와"
