"""HTTP gateway: a teacher service behind ``/v1/completions`` with ``prompt_logprobs``, in the format of vLLM.

`app` has the endpoints, `completions` converts requests and scores. A gateway is a client of the service and keeps no
state, so several can run beside each other.
"""
