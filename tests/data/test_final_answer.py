"""Which part of a completion counts as its final answer."""

import pytest

from nemo_fp8rl.data.rewards import VERIFIERS

exact_match, math, hf_math_verify = (VERIFIERS[name] for name in ("exact_match", "math", "hf_math_verify"))
GSM8K = "Natalia sold 48/2 = 24 clips in May. 48+24 = 72 #### 72"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"<think>maybe \boxed{3}</think> \boxed{72}", "72"),
        (r"<think>first 3</think><think>then 5</think>72", "72"),
        (r"opened by the template, \boxed{3}</think> \boxed{72}", "72"),
        (r"\boxed{5} no, \boxed{72}", "72"),
        (r"x = \boxed{3} or \boxed{-3}", r"\{3,-3\}"),
        (r"\boxed{\text{B}}", "B"),
        ("Answer: A", "A"),
        ("**Answer:** (A)", "A"),
        ("The correct answer is: **A**", "A"),
        ("A. Paris", "A"),
        ("Paris", "Paris"),
        ("The answer is paris. It is in France.", "Paris"),
        ("Answer: Washington D.C.", "Washington D.C."),
        ("<think>Rome?</think>\n\nParis.", "Paris"),
        ("True", "True"),
        ("Let me answer: 5 or so.\nAnswer: 7", "7"),
        ("She sold 1,000. #### 1,000", "1000"),
        ("48/2 = 24, 48 + 24 = 72 #### 72", GSM8K),
        (r"\boxed{72}", GSM8K),
        ("The answer is 72", GSM8K),
    ],
)
def test_math_finds_the_final_answer(completion, answer):
    assert math(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{72} then \boxed{5}", "72"),
        (r"<think>\boxed{72}</think> \boxed{5}", "72"),
        (r"<think>it is \boxed{72}", "72"),  # cut short: no answer yet
        (r"\boxed{3} and \boxed{4}", "3"),
        ("Answer: B", "A"),
        ("It may be A or B", "A"),
        (r"\boxed{Pairs}", "Paris"),  # a product of letters, in another order
        ("Not Paris but Rome", "Paris"),
        ("Answer: false", "True"),
        ("24 #### 24", GSM8K),
        ("x", "X"),
    ],
)
def test_math_takes_nothing_but_the_final_answer(completion, answer):
    assert math(completion, answer) == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>7?</think> 72", 1),
        ("7?</think>\n72\n", 1),
        ("<think>72", 0),
        ("<think>72</think>", 0),
        ("Answer: 72", 0),
    ],
)
def test_exact_match_leaves_out_a_closed_think_block(completion, reward):
    assert exact_match(completion, "72") == reward


def test_the_verifier_of_nemo_rls_environment_reads_the_whole_completion():
    assert hf_math_verify(r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert hf_math_verify(r"<think>\boxed{72}", "72") == 1.0
    assert hf_math_verify(r"<think>maybe \boxed{3}</think> \boxed{72}", "72") == 0.0
