# Completions of octavo, made by: octavo completion fish
function __octavo_at
    set -l at
    set -l words (commandline -opc)
    for word in $words[2..]
        if test -z "$at"
            set at $word
        else if contains -- "$at $word" @KINDS@
            set at "$at $word"
        end
    end
    test "$at" = "$argv"
end
complete -c octavo -f
