"""What is to be graded: the request that `kvasir grade` makes of its options, and that a batch's manifest keeps."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from grading.roster import Roster, read_rosters
from grading.rubric.rubric import Aspect
from grading.submissions.reading import Submission, inputs_inside, list_submissions, read_submissions
from grading.submissions.tokens import LETTERS_PER_TOKEN

# All criteria in one answer, or each in an answer of its own, from one KV cache.
AskForm = Literal["together", "criteria"]
ASK_FORMS: tuple[AskForm, ...] = ("together", "criteria")


@dataclass(frozen=True, slots=True)
class AspectModel:
    """The model that grades one aspect, and how it samples."""

    name: str
    context: int  # tokens; prompts and answers are planned for it
    temperature: float = 0.0
    top_p: float = 0.9
    letters_per_token: float = LETTERS_PER_TOKEN

    def __post_init__(self) -> None:
        if self.context < 1 or not 0.1 <= self.letters_per_token <= 100:  # a batch's folder may be damaged
            raise ValueError(f"{self.name} can't have {self.context} tokens of {self.letters_per_token} letters")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which submissions of the folder a run grades.

    - `WHOLE_CLASS`: all of them.
    - `names` or `limit`: a part of the class. The class's `other_names` keep their jobs and their grades.
    - `from_manifest`: once more the class of a batch, of which only what is unfinished is graded. Its names may have
      left the folder since; they keep their grades.
    """

    names: tuple[str, ...] = ()  # or LMS ids; (): all
    limit: int = 0  # the first so many of these; 0: all
    other_names: tuple[str, ...] | Literal["all"] = ()  # "all": everybody else in the folder
    from_manifest: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nobody in the folder out."""
        return not (self.names or self.limit)

    def leaves_alone(self, name: str) -> bool:
        """Whether it is in the class and keeps what it has, unless it is graded now."""
        return self.other_names == "all" or name in self.other_names


WHOLE_CLASS = Selection()


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """What to grade, by what, with which models."""

    folder: Path
    rubric: Path
    models: Mapping[Aspect, AspectModel]
    solution: Path | None = None
    template: Path | None = None
    selection: Selection = WHOLE_CLASS
    samples: int = 1  # answers to each prompt, from one prefill; where they disagree a person looks
    ask: AskForm = "together"
    # Of a submission; 0: as many as the models have room for; None: planned with the limits of earlier releases.
    max_submission_tokens: int | None = 0
    rosters: tuple[Path, ...] = ()  # files that say who is in the class, for `read_rosters`
    copies: Mapping[str, Path] = field(default_factory=dict)  # the batch's own, of rubric, solution, template, examples
    examples: Path | None = None  # hand grades, some of whose work is shown to the models
    sampled_names: frozenset[str] = frozenset()  # submissions in the bound's sample, which are never examples

    @property
    def excluded_paths(self) -> dict[str, str]:
        """What lies among the submissions and is none, as `inputs_inside` has it."""
        documents = {
            "the rubric": self.rubric,
            "the solution": self.solution,
            "the template": self.template,
            "the examples' grades": self.examples,
            **{f"roster {number}": path for number, path in enumerate(self.rosters, 1)},
        }
        return inputs_inside(self.folder, documents)

    @property
    def stored_form(self) -> dict[str, object]:
        """What the manifest keeps of it, so that `kvasir retry` and `watch` can build the same prompts again."""
        paths = {"folder": self.folder, "rubric": self.rubric, "solution": self.solution, "template": self.template}
        return {
            **{key: str(path.resolve()) if path else "" for key, path in paths.items()},
            "models": {aspect: model.name for aspect, model in self.models.items()},
            # What prompts were planned for: read again, they are the same although the configuration has changed.
            "settings": {aspect: asdict(model) for aspect, model in self.models.items()},
            "only": list(self.selection.names),
            "limit": self.selection.limit,
            "samples": self.samples,
            "ask": self.ask,
            **({"examples": str(self.examples.resolve())} if self.examples else {}),
            **({} if self.max_submission_tokens is None else {"max_submission_tokens": self.max_submission_tokens}),
        }

    def read_roster(self) -> Roster:
        """Who is in the class. Raises UsageError."""
        return read_rosters(self.rosters)

    def read(self) -> list[Submission]:
        """All submissions in the folder. Raises SubmissionError, and as `read_roster`."""
        return read_submissions(self.folder, excluded_paths=self.excluded_paths, student_of=self.read_roster().key)

    def selected_names(self, selection: Selection) -> list[str]:
        """The names of those selected; no submission is read for it. Raises as `read`.

        A section of the roster stands for the submissions of its people.
        """
        roster = self.read_roster()

        def matching(names: Collection[str], limit: int = 0) -> list[str]:
            return list_submissions(self.folder, names, limit, selection.from_manifest, self.excluded_paths, roster.key)

        names = selection.names
        if sections := {person.section for person in roster.people}.intersection(names):
            owners = roster.owners(matching(()))
            of_sections = [
                name for name, owner in owners.items() if sections & {person.section for person in owner.people}
            ]
            names = (*of_sections, *(name for name in names if name not in sections or not of_sections))
        return matching(names, selection.limit)
