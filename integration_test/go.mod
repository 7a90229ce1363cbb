module github.com/postroom/postroom/integration_test

go 1.26.0
