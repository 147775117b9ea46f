# aider, one-shot.
# CONFIGURE `OPENAI_API_BASE=http://HOST:8000/v1`, `OPENAI_API_KEY=none`, `aider --model openai/NAME`
export OPENAI_API_BASE=$URL/v1 OPENAI_API_KEY=none
git init -q . && echo "print(1)" > a.py
aider --model openai/$MODEL --no-show-model-warnings --yes --no-auto-commits --no-check-update --analytics-disable \
  --message "Say hello." a.py < /dev/null | tee answer
grep -q "Tokens:" answer
echo "WORKS one-shot: chats, streamed"
