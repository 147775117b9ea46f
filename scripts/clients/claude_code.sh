# Claude Code, one-shot.
# CONFIGURE `ANTHROPIC_BASE_URL=http://HOST:8000 ANTHROPIC_AUTH_TOKEN=none`, `ANTHROPIC_MODEL=NAME`
export ANTHROPIC_BASE_URL=$URL ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=$MODEL ANTHROPIC_SMALL_FAST_MODEL=$MODEL
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_TELEMETRY=1
claude -p "Say hello." | tee answer
grep -q . answer && ! grep -q "API Error" answer
echo "WORKS one-shot: messages with tools, streamed"
