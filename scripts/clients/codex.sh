# Codex CLI, one-shot.
# CONFIGURE `model_providers.octavo = {name = "Octavo", base_url = "http://HOST:8000/v1", wire_api = "responses"}`, `model_provider = "octavo"` in `config.toml`
export NONE=none
codex exec --skip-git-repo-check -c model="$MODEL" -c model_provider=octavo -c model_providers.octavo.name=Octavo \
  -c model_providers.octavo.base_url="$URL/v1" -c model_providers.octavo.wire_api=responses \
  -c model_providers.octavo.env_key=NONE "Say hello." < /dev/null | tee answer
grep -q . answer
echo "WORKS one-shot: responses with tools, streamed"
