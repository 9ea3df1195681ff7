"""The real cluster: the OpenAI API, the driver of the policy, engine processes and their control.

It executes what the policy instructs and knows no scheduling rule. Import from its modules; most of
them need the packages of the extra `serve`.
"""

__all__: list[str] = []
