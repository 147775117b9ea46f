#compdef octavo
# Completions of octavo, made by: octavo completion zsh
# compinit reads the file as the function's body when it is first asked for, which defines the function and calls it.
_octavo() {
  local at= before=$words[CURRENT-1] word
  local -a offered flags values
  for word in "${(@)words[2,CURRENT-1]}"; do
    if [[ -z $at ]]; then at=$word; else case "$at $word" in (@KINDS@) at="$at $word" ;; esac; fi
  done
  [[ $words[CURRENT] == --*=* ]] && before=${words[CURRENT]%%=*} && compset -P '*='
  case $at in
@CASES@
  esac
  if [[ $values == @ ]]; then _files
  elif (( $#values )); then compadd -a values
  elif [[ $words[CURRENT] == -* ]]; then compadd -a flags
  else
    compadd -a offered
    [[ -z $at ]] || _files
  fi
}
if [[ $funcstack[1] == _octavo ]]; then _octavo "$@"; else compdef _octavo octavo; fi
