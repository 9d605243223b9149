"""Pairwise comparison by a judge model at a URL, which sees both orders of the answers."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from finetune.errors import FinetuneError
from finetune.evaluation.measures import Measure, of_scores
from finetune.inference.endpoint import Endpoint
from finetune.process.progress import counted

PROMPT = """Two assistants answered the same question. Judge which answer is better: more correct, \
more helpful, to the point. Do not let their order or their length decide.

[Question]
{question}

[Answer A]
{first}

[Answer B]
{second}

Reply with one line: "Verdict: A", "Verdict: B" or "Verdict: tie"."""
VERDICT = re.compile(r"verdict\W*\b(A|B|tie)\b", re.IGNORECASE)
BARE = re.compile(r"\W*(A|B|tie)\W*", re.IGNORECASE)
MOST_UNREAD = 0.1
"""Maximum share of rows with an unreadable verdict; above it the judge is rejected."""
AT_ONCE = 8
"""Number of concurrent requests to the judge."""

Compared = tuple[str, str, str]
"""A question, the answer of the subject, and the answer of the other model."""


@dataclass(frozen=True)
class Judge:
    """A model that compares answers."""

    endpoint: Endpoint
    max_tokens: int = 512

    def check(self, compares: bool, answers: bool) -> None:
        """Reject a judge that has nothing to compare.

        Raises:
            FinetuneError: there is only one model, or the rows are texts.
        """
        if not compares:
            raise FinetuneError("--judge: compares two models; name the other one with --against")
        if not answers:
            raise FinetuneError("--judge: compares answers, and the rows are texts")

    def verdict(self, question: str, first: str, second: str) -> str | None:
        """`a`, `b` or `tie`; None if the reply has no verdict."""
        text = PROMPT.format(question=question, first=first, second=second)
        reply = self.endpoint.chat(
            [{"role": "user", "content": text}], max_tokens=self.max_tokens, temperature=0.0
        )
        found = VERDICT.findall(reply.text) or [m[1] for m in [BARE.fullmatch(reply.text)] if m]
        return found[-1].lower() if found else None


def win_rate(judge: Judge, compared: Sequence[Compared]) -> Measure:
    """Mean over rows: 1 if the subject wins in both orders, 0 if it loses in both, else 0.5.

    Raises:
        FinetuneError: the judge does not answer, or more than a tenth of the rows have no verdict.
    """
    with ThreadPoolExecutor(AT_ONCE) as threads:
        given = threads.map(lambda row: _both_orders(judge, row), compared)
        orders = list(counted(given, "judging", len(compared)))
    scores = [_score(first, second) for first, second in orders]
    unread = scores.count(None)
    if unread > MOST_UNREAD * len(scores):
        raise FinetuneError(
            f"--judge {judge.endpoint.url}: {unread} of {len(scores)} rows have no readable "
            f"verdict ('Verdict: A', 'Verdict: B' or 'Verdict: tie'); use another model than "
            f"'{judge.endpoint.model}'"
        )
    kept = [score for score in scores if score is not None]
    detail = {
        "judge": judge.endpoint.model,
        "prompt": PROMPT,
        "wins": kept.count(1.0),
        "ties": kept.count(0.5),
        "losses": kept.count(0.0),
        "unread": unread,
        "order_decided": sum(first == second != "tie" for first, second in orders if first),
        "verdicts": scores,
    }
    return of_scores("win_rate", kept, detail=detail)


def _both_orders(judge: Judge, row: Compared) -> tuple[str | None, str | None]:
    question, mine, other = row
    return judge.verdict(question, mine, other), judge.verdict(question, other, mine)


def _score(first: str | None, second: str | None) -> float | None:
    if first is None or second is None:
        return None
    return {("a", "b"): 1.0, ("b", "a"): 0.0}.get((first, second), 0.5)
