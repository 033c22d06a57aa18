"""Training text for the demo tokenizer: made up here, so that the repository needs no download.

Word lists poured into templates of the four kinds of text that a grader's prompts hold: prose, R, Python and JSON.
"""

import random
from collections.abc import Callable


def words(text: str) -> tuple[str, ...]:
    """A list written as one text."""
    return tuple(text.split())


NOUNS = words(
    "analysis answer argument assignment assumption average axis bar baseline batch bias branch budget campaign "
    "category cause cell change channel chart chunk churn city claim class cleaning clue cluster code coefficient "
    "column comment comparison completeness conclusion condition confidence context contract correlation cost count "
    "country course coverage credit criterion customer data dataset date day decision decline definition degree "
    "demand detail diagram difference discount distribution document domain driver duplicate effect effort email "
    "error estimate evidence example exercise experiment explanation export factor failure feature feedback figure "
    "file filter finding fit flag forecast formula fraction frame function gap grade graph group growth guidance "
    "habit heading hint histogram history household hypothesis idea impact import improvement income increase index "
    "indicator input insight instruction instructor interest interpretation interval inventory issue item join key "
    "label language lesson level library limit limitation line list loss loyalty manager margin mark market matrix "
    "mean meaning measure median member memory message method metric minute missing mistake model month name need "
    "notebook number object observation offer office operation option order outcome outfitter outlier output package "
    "page paragraph part path pattern percent percentage period picture pipeline plan plot point policy population "
    "position practice prediction price probability problem product profit project promotion proportion purpose "
    "quality quantity quarter query question range rate ratio reader reading reason reasoning recommendation record "
    "reference region regression relation relationship report request residual resource response result retention "
    "return revenue review risk river row rubric rule sale sample scale scenario schema scope score screen season "
    "section seed segment selection sentence series session share shop sign signal significance size skill slope "
    "solution source spread standard start statement statistic step stock store story strategy strength structure "
    "student style submission subset suggestion sum summary supplier support survey syntax system table target task "
    "team template term test text theme threshold time title tool topic total track traffic transaction trend type "
    "unit update use user value variable variance variation view visit visualization warning weakness website week "
    "weight winter word work writing year"
)
VERBS = words(
    "add aggregate answer apply argue ask assess assume avoid base begin break build calculate call change check "
    "choose clean combine comment compare complete compute conclude confirm connect consider contain convert count "
    "cover create deal decide define depend derive describe discuss display divide drop earn end ensure estimate "
    "evaluate examine exclude expect explain explore export express extend fail fill filter find fit fix focus "
    "follow forget format give grade group grow guess handle help identify ignore illustrate import improve include "
    "increase indicate inspect interpret introduce investigate join justify keep label lack lead leave limit list "
    "load look lose make mark match mean measure mention merge miss move name need note notice omit order organize "
    "pass perform plot predict prefer prepare present print produce provide prove purchase put rank reach read "
    "recommend reduce refer relate remain remove rename repeat replace report represent reproduce require return "
    "reveal review round run save say scale see seem select separate set show simplify solve sort specify split "
    "start state store submit suggest summarize support take tell test think total treat trust try turn type "
    "understand use verify visualize want warn weigh work write"
)
ADJECTIVES = words(
    "accurate actual additional appropriate average basic better brief careful causal central clean clear common "
    "complete complex concise consistent convincing correct critical current deep descriptive different direct "
    "distinct early easy effective empty entire equal excellent expected final fine first formal full general good "
    "hard helpful high honest important incomplete incorrect independent initial interesting large last late likely "
    "linear little local logical long loyal low main major many meaningful missing monthly negative new next noisy "
    "normal numeric obvious old open original overall partial plain plausible poor positive possible practical "
    "precise previous proper quarterly random raw readable ready real reasonable recent regular relevant reliable "
    "repeated robust same seasonal second separate several sharp short significant similar simple single small "
    "solid sound special specific strong suitable surprising technical thin thorough tidy total typical unclear "
    "uneven unusual useful usual vague valid valuable visible weak weekly whole wide wrong yearly"
)
ADVERBS = words(
    "again almost already also always briefly carefully clearly completely correctly directly easily entirely "
    "especially exactly fairly finally first fully further generally hardly however instead mainly maybe mostly "
    "nearly never nicely often only partly perhaps properly quickly quite rather really simply slightly sometimes "
    "soon still strongly there therefore together too twice usually very well yet"
)
SMALL = words(
    "a about above across after against all an and any are as at be because been before between both but by can "
    "could did do does during each either enough even every few for from had has have how if in into is it its just "
    "less like may might more most much must my neither no nor not now of off on one or other our out over own per "
    "should since so some such than that the their them then these they this those though three through to two "
    "under until up was we were what when where whether which while who why will with within without would you your"
)
NAMES = words(
    "sales customers orders revenue price quantity region month year segment churned tenure visits returns discount "
    "margin category store_id customer_id order_id order_date signup_date total_revenue monthly_sales churn_rate "
    "by_region by_month clean_sales model result summary_table n_customers avg_order last_order is_member df dt "
    "train test fit pred x y i n value label plot_data top_products joined inactive_days"
)
R_FUNCTIONS = words(
    "library read_csv read.csv mutate filter group_by summarise summarize arrange select left_join inner_join count "
    "distinct drop_na is.na mean median sd sum nrow ncol head glimpse str summary lm glm predict ggplot aes geom_col "
    "geom_line geom_point geom_bar geom_histogram facet_wrap labs theme_minimal scale_y_continuous as.Date "
    "floor_date ymd month year round paste paste0 ifelse case_when c data.frame factor levels table t.test "
    "chisq.test cor quantile n n_distinct slice_max pivot_longer pivot_wider set.seed sample print function stopifnot"
)
PYTHON_FUNCTIONS = words(
    "pd.read_csv df.groupby agg merge dropna fillna sort_values value_counts head describe reset_index assign query "
    "astype pd.to_datetime np.mean np.where np.sqrt plt.plot plt.bar plt.title plt.xlabel plt.show len range print "
    "sum round isna nunique rolling resample train_test_split LogisticRegression fit predict score sns.barplot"
)
JSON_KEYS = words(
    "points max_points comment comments feedback strengths improvements criterion criteria id title summary "
    "evidence confidence grade total answer reason code quality what_worked what_needs_work suggestion suggestions "
    "overall line issue issues severity question next_steps correctness"
)
ENDINGS = ("", "", "", "s", "ed", "ing")

WORDS = frozenset((*NOUNS, *VERBS, *ADJECTIVES, *ADVERBS, *SMALL))

Draw = random.Random


def make_corpus(seed: int, paragraphs: int = 1500) -> list[str]:
    """Paragraphs of all four kinds, the same for the same seed. Each word of the lists occurs at least four times."""
    draw = random.Random(seed)
    kinds: tuple[Callable[[Draw], str], ...] = (_prose, _prose, _r_code, _python_code, _json_answer, _markdown)
    written = [draw.choice(kinds)(draw) for _ in range(paragraphs)]
    every = [*sorted(WORDS), *NAMES, *R_FUNCTIONS, *PYTHON_FUNCTIONS, *JSON_KEYS]
    return [*written, *(f" {word} {word.capitalize()} {word} {word} {word}" for word in every)]


def _verb(draw: Draw) -> str:
    verb, ending = draw.choice(VERBS), draw.choice(ENDINGS)
    return (verb[:-1] if ending in ("ed", "ing") and verb.endswith("e") else verb) + ending


def _phrase(draw: Draw) -> str:
    the = draw.choice(("the", "a", "your", "each", "this", "no", "our"))
    return f"{the} {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"


def sentence(draw: Draw) -> str:
    """An English sentence without sense."""
    forms = (
        f"{_phrase(draw)} {_verb(draw)} {_phrase(draw)} {draw.choice(SMALL)} {_phrase(draw)}.",
        f"{draw.choice(ADVERBS)}, {_phrase(draw)} {_verb(draw)} {draw.choice(ADVERBS)}, {draw.choice(SMALL)} it "
        f"{_verb(draw)} {draw.choice(NOUNS)}s and {draw.choice(NOUNS)}s.",
        f"you {draw.choice(('should', 'could', 'did not', 'can', 'must'))} {draw.choice(VERBS)} {_phrase(draw)}; "
        f"{draw.choice(SMALL)} {_phrase(draw)} is {draw.choice(ADJECTIVES)}.",
        f"in {draw.randint(2019, 2024)}, {draw.randint(1, 99)}.{draw.randint(0, 9)}% of {draw.choice(NOUNS)}s "
        f"{_verb(draw)} ({draw.choice(NOUNS)} {draw.randint(1, 400)}).",
    )
    text = draw.choice(forms)
    return text[0].upper() + text[1:]


def _prose(draw: Draw) -> str:
    return " ".join(sentence(draw) for _ in range(draw.randint(2, 6)))


def _markdown(draw: Draw) -> str:
    items = "\n".join(f"- **{draw.choice(NOUNS)}**: {sentence(draw)}" for _ in range(draw.randint(1, 4)))
    return f"## {draw.randint(1, 6)}. {draw.choice(ADJECTIVES).capitalize()} {draw.choice(NOUNS)}\n\n{items}\n"


def code(draw: Draw, language: str) -> str:
    """Lines of R or Python without sense."""
    return (_r_code(draw) if language == "R" else _python_code(draw)).rstrip("\n")


def _call(draw: Draw, functions: tuple[str, ...]) -> str:
    arguments = (
        f"{draw.choice(NAMES)} = {draw.choice(functions)}({draw.choice(NAMES)})",
        draw.choice(NAMES),
        f'"{draw.choice(NAMES)}"',
        f"{draw.choice(NAMES)} {draw.choice(('==', '>', '<', '!=', '>=', '*', '/', '+', '-'))} {draw.randint(0, 100)}",
        f'{draw.choice(NAMES)} = "{draw.choice(NOUNS)} {draw.choice(NOUNS)}"',
        "na.rm = TRUE" if functions is R_FUNCTIONS else "ascending=False",
    )
    return f"{draw.choice(functions)}({', '.join(draw.sample(arguments, draw.randint(0, 3)))})"


def _r_code(draw: Draw) -> str:
    lines = [f"# {sentence(draw)}", f"library({draw.choice(('tidyverse', 'dplyr', 'ggplot2', 'readr', 'lubridate'))})"]
    for _ in range(draw.randint(1, 4)):
        pipe = draw.choice((" %>%", " |>"))
        chain = f"{pipe}\n  ".join(_call(draw, R_FUNCTIONS) for _ in range(draw.randint(1, 4)))
        lines.append(f"{draw.choice(NAMES)} <- {draw.choice(NAMES)}{pipe}\n  {chain}")
    return "\n".join(lines) + "\n"


def _python_code(draw: Draw) -> str:
    lines = ["import pandas as pd", f"import {draw.choice(('numpy as np', 'matplotlib.pyplot as plt'))}", ""]
    for _ in range(draw.randint(2, 5)):
        chain = ".".join(_call(draw, PYTHON_FUNCTIONS) for _ in range(draw.randint(1, 3)))
        lines.append(f"{draw.choice(NAMES)} = {chain}  # {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}")
    lines.append(f"for {draw.choice(NAMES)} in {draw.choice(NAMES)}:\n    print({draw.choice(NAMES)})\n")
    return "\n".join(lines)


def _json_answer(draw: Draw) -> str:
    items = [
        f'{{"{draw.choice(JSON_KEYS)}": "{draw.choice(NOUNS)}", "points": {draw.randint(0, 20)}, '
        f'"{draw.choice(JSON_KEYS)}": "{sentence(draw)}", "{draw.choice(JSON_KEYS)}": ["{_phrase(draw)}"]}}'
        for _ in range(draw.randint(1, 4))
    ]
    return '{"criteria": [' + ", ".join(items) + f'], "{draw.choice(JSON_KEYS)}": "{sentence(draw)}"}}'
