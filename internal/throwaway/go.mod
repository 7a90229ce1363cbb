module github.com/postroom/postroom/internal/throwaway

go 1.26.0
