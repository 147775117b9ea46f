# opencode, one-shot.
# CONFIGURE a provider with `"npm": "@ai-sdk/openai-compatible"`, `"options": {"baseURL": "http://HOST:8000/v1"}`
mkdir -p .config/opencode
cat > .config/opencode/opencode.json <<J
{"provider": {"octavo": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$URL/v1", "apiKey": "none"},
 "models": {"$MODEL": {"limit": {"context": 65536, "output": 256}}}}}, "model": "octavo/$MODEL", "autoupdate": false, "share": "disabled"}
J
opencode run "Say hello." < /dev/null | tee answer
grep -q . answer
echo "WORKS one-shot: chats with tools, streamed"
