module github.com/postroom/postroom

go 1.26.0
