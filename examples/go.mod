module github.com/postroom/postroom/examples

go 1.26.0
