"""A request for grading: made from the options of `kvasir grade`, and kept in a batch's manifest."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from grading.roster import Roster, read_rosters
from grading.rubric.rubric import Aspect
from grading.submissions.reading import Submission, inputs_inside, list_submissions, read_submissions
from grading.submissions.tokens import LETTERS_PER_TOKEN

# With "together", one answer covers all criteria. With "criteria", each criterion has its own answer, and all answers
# use one KV cache.
AskForm = Literal["together", "criteria"]
ASK_FORMS: tuple[AskForm, ...] = ("together", "criteria")


@dataclass(frozen=True, slots=True)
class AspectModel:
    """The model that grades one aspect, and how its answers are sampled."""

    name: str
    context: int  # maximum number of tokens of a prompt and its answer together
    temperature: float = 0.0
    top_p: float = 0.9
    letters_per_token: float = LETTERS_PER_TOKEN

    def __post_init__(self) -> None:
        # The values can come from a damaged batch folder.
        if self.context < 1 or not 0.1 <= self.letters_per_token <= 100:
            raise ValueError(
                f"{self.name} has invalid settings: a context of {self.context} tokens, and "
                f"{self.letters_per_token} letters in a token"
            )


@dataclass(frozen=True, slots=True)
class Selection:
    """Which submissions of the folder a run grades.

    - `WHOLE_CLASS`: all of them.
    - `names` or `limit`: a part of the class. The class's `other_names` keep their jobs and their grades.
    - `from_manifest`: the class of a batch again; only what is unfinished is graded. Names that have left the folder
      since then keep their grades.
    """

    names: tuple[str, ...] = ()  # names or LMS ids of submissions; () means all
    limit: int = 0  # only this many submissions, from the first one on; 0 means all
    other_names: tuple[str, ...] | Literal["all"] = ()  # "all" means everybody else in the folder
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
    # Number of answers to each prompt, all from one prefill. If the answers disagree, a person must look at the grade.
    samples: int = 1
    ask: AskForm = "together"
    # Maximum number of tokens of a submission. 0 means as many as fit into the models' contexts. None means that the
    # batch was planned with the limits of earlier releases.
    max_submission_tokens: int | None = 0
    # Files that list the people of the class, for `read_rosters`.
    rosters: tuple[Path, ...] = ()
    # The batch's own copies of rubric, solution, template and examples.
    copies: Mapping[str, Path] = field(default_factory=dict)
    # The table of hand grades. Some of this graded work becomes examples for the models.
    examples: Path | None = None
    sampled_names: frozenset[str] = frozenset()  # submissions in the sample of a bound; they never become examples

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
            # The manifest records these settings, so the prompts stay the same after a change of the configuration.
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
