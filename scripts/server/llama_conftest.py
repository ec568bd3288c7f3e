"""Takes the place of the conftest of llama.cpp's server tests, for `scripts/server/llama-server`. No server is started for models that are not here: their tests
are skipped. What names the program is not judged, and neither are words that were drawn by chance: seeds mean other numbers there."""

import pytest
import utils

started, asked, streamed, matched = (utils.ServerProcess.start, utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request, utils.match_regex)
drawn = False


def start(self, *arguments, **named):
    try:
        return started(self, *arguments, **named)
    except RuntimeError as error:
        if "return code 77" in str(error):
            pytest.skip(f"no model {self.model_hf_repo} {self.model_hf_file or ''}")
        if "return code 78" in str(error):
            pytest.skip("flags that Kiln does not have")
        raise


def note(self, data):
    """Whether chance has a part in the answer."""
    global drawn
    data = data if isinstance(data, dict) else {}
    shaped = any(data.get(name) for name in ("grammar", "json_schema", "response_format"))
    heat = data.get("temperature")
    drawn = (self.temperature if heat is None else heat) > 0 and not shaped


def named(body):
    if isinstance(body, dict) and "system_fingerprint" in body:
        body["system_fingerprint"] = f"b, which here is {body['system_fingerprint']}"
    return body


def make_request(self, method, path, data=None, *arguments, **more):
    note(self, data)
    response = asked(self, method, path, data, *arguments, **more)
    named(response.body)
    return response


def make_stream_request(self, method, path, data=None, *arguments, **more):
    note(self, data)
    return (named(chunk) for chunk in streamed(self, method, path, data, *arguments, **more))


def match_regex(regex, text):
    return drawn or matched(regex, text)


utils.ServerProcess.start, utils.ServerProcess.make_request = start, make_request
utils.ServerProcess.make_stream_request, utils.match_regex = make_stream_request, match_regex


@pytest.fixture(autouse=True)
def stop_servers():
    yield
    for server in set(utils.server_instances):
        server.stop()
