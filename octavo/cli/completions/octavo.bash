# Completions of octavo, made by: octavo completion bash
# Bash takes the = of --flag=value as a word of its own.
_octavo_files() {
  local file
  [ ${#COMPREPLY[@]} -gt 0 ] || compopt -o filenames 2>/dev/null
  while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$1")
}
_octavo() {
  local current=${COMP_WORDS[COMP_CWORD]} before= at= words= flags= values= word index=$((COMP_CWORD-1))
  COMPREPLY=()
  if [ "$current" = = ]; then current=; elif [ "${COMP_WORDS[index]}" = = ]; then index=$((index-1)); fi
  [ "$index" -gt 0 ] && before=${COMP_WORDS[index]}
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [ -z "$at" ]; then at=$word; else case "$at $word" in @KINDS@) at="$at $word" ;; esac; fi
  done
  case "$at" in
@CASES@
  esac
  if [ "$values" = @ ]; then _octavo_files "$current"
  elif [ -n "$values" ]; then COMPREPLY=($(compgen -W "$values" -- "$current"))
  else
    case "$current" in
      -*) COMPREPLY=($(compgen -W "$flags" -- "$current")) ;;
      *) COMPREPLY=($(compgen -W "$words" -- "$current"))
         [ -z "$at" ] || _octavo_files "$current" ;;
    esac
  fi
}
complete -F _octavo octavo
