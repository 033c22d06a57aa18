"""A request for grading: made from the options of `kvasir grade`, and kept in a batch's manifest."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from grading.roster import Roster, read_rosters
from grading.rubric.rubric import Aspect
from grading.submissions.reading import Submission, inputs_inside, list_submissions, read_submissions
from grading.submissions.tokens import LETTERS_PER_TOKEN

# Whether one answer covers all criteria, or each criterion gets an answer, all from one KV cache.
AskForm = Literal["together", "criteria"]
ASK_FORMS: tuple[AskForm, ...] = ("together", "criteria")


@dataclass(frozen=True, slots=True)
class AspectModel:
    """The model that grades one aspect, and how its answers are sampled."""

    name: str
    context: int  # in tokens; prompts and answers are planned to fit
    temperature: float = 0.0
    top_p: float = 0.9
    letters_per_token: float = LETTERS_PER_TOKEN

    def __post_init__(self) -> None:
        # the values may come from a damaged batch folder
        if self.context < 1 or not 0.1 <= self.letters_per_token <= 100:
            raise ValueError(
                f"{self.name} can't have a context of {self.context} tokens with {self.letters_per_token} letters each"
            )


@dataclass(frozen=True, slots=True)
class Selection:
    """Which submissions of the folder a run grades.

    - `WHOLE_CLASS`: all of them.
    - `names` or `limit`: a part of the class. The class's `other_names` keep their jobs and their grades.
    - `from_manifest`: the class of a batch again; only what is unfinished is graded. Names that have left the folder
      since then keep their grades.
    """

    names: tuple[str, ...] = ()  # names or LMS ids; (): all
    limit: int = 0  # only this many of them, the first ones; 0: all
    other_names: tuple[str, ...] | Literal["all"] = ()  # "all": everybody else in the folder
    from_manifest: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it includes everybody in the folder."""
        return not (self.names or self.limit)

    def leaves_alone(self, name: str) -> bool:
        """Whether this submission is in the class but is not graded by this run, unless it is also selected."""
        return self.other_names == "all" or name in self.other_names


WHOLE_CLASS = Selection()


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """What to grade, by which rubric, with which models."""

    folder: Path
    rubric: Path
    models: Mapping[Aspect, AspectModel]
    solution: Path | None = None
    template: Path | None = None
    selection: Selection = WHOLE_CLASS
    samples: int = 1  # answers to each prompt, from one prefill; if they disagree, a person looks
    ask: AskForm = "together"
    # 0: as many as the models have room for; None: the batch was planned with the limits of earlier releases
    max_submission_tokens: int | None = 0
    rosters: tuple[Path, ...] = ()  # Files that say who is in the class, for `read_rosters`.
    # The batch's copies of rubric, solution, template and examples.
    copies: Mapping[str, Path] = field(default_factory=dict)
    examples: Path | None = None  # hand grades; some of the graded work becomes examples for the models
    sampled_names: frozenset[str] = frozenset()  # submissions in the bound's sample, which are never examples

    @property
    def excluded_paths(self) -> dict[str, str]:
        """The files inside the submissions' folder that are not submissions, as from `inputs_inside`."""
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
        """The fields that the manifest keeps, so that `kvasir retry` and `watch` can build the same prompts again."""
        paths = {"folder": self.folder, "rubric": self.rubric, "solution": self.solution, "template": self.template}
        return {
            **{key: str(path.resolve()) if path else "" for key, path in paths.items()},
            "models": {aspect: model.name for aspect, model in self.models.items()},
            # With the settings used for planning, the prompts stay the same even if the configuration has changed.
            "settings": {aspect: asdict(model) for aspect, model in self.models.items()},
            "only": list(self.selection.names),
            "limit": self.selection.limit,
            "samples": self.samples,
            "ask": self.ask,
            **({"examples": str(self.examples.resolve())} if self.examples else {}),
            **({} if self.max_submission_tokens is None else {"max_submission_tokens": self.max_submission_tokens}),
        }

    def read_roster(self) -> Roster:
        """Read who is in the class. Raises UsageError."""
        return read_rosters(self.rosters)

    def read(self) -> list[Submission]:
        """Read all submissions in the folder. Raises SubmissionError, and as `read_roster`."""
        return read_submissions(self.folder, excluded_paths=self.excluded_paths, student_of=self.read_roster().key)

    def selected_names(self, selection: Selection) -> list[str]:
        """Return the names of the selected submissions without reading their files. Raises as `read`.

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
