from jaxrl_llm.serve.app import make_app as make_app
from jaxrl_llm.serve.requests import RequestError as RequestError
from jaxrl_llm.serve.requests import SampleRequest as SampleRequest
from jaxrl_llm.serve.server import Reply as Reply
from jaxrl_llm.serve.server import TokenServer as TokenServer
