"""A reward from an LLM judge: a number between 0 and 1 that an OpenAI-compatible server returns.

    custom_reward_function.path=docs/examples/llm_judge.py
    custom_reward_function.kwargs.url=http://127.0.0.1:8000/v1/chat/completions
    custom_reward_function.kwargs.model=judge custom_reward_function.timeout_s=60

An ``async def`` function is called for ``custom_reward_function.max_concurrency`` responses at a time in each process.
"""

import asyncio
import json
import re
import urllib.request

QUESTION = "Grade the answer between 0 and 1. Reply with the number only.\nQuestion: {}\nAnswer: {}\nReference: {}"


async def compute_score(prompt, response, ground_truth, url, model):
    """Return the grade of the judge, and whether its reply was a number.

    Args:
        prompt: Prompt as in the data: a text or a list of chat messages.
        response: Decoded response.
        ground_truth: Value of column ``data.ground_truth_key``.
        url: Address of the judge.
        model: Name of the judge's model.
    """
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    messages = [{"role": "user", "content": QUESTION.format(question, response, ground_truth)}]
    reply = await asyncio.to_thread(_post, url, {"model": model, "messages": messages, "temperature": 0})
    grade = re.search(r"\d+\.?\d*", reply["choices"][0]["message"]["content"])
    return {"score": min(float(grade.group()), 1.0) if grade else 0.0, "judge_replied": grade is not None}


def _post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
