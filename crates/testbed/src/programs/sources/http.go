// An HTTP server that answers with the body it is sent, or with the path where there is none: http ADDRESS:PORT
package main

import (
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
)

func main() {
	http.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		body, err := io.ReadAll(request.Body)
		if err != nil {
			http.Error(answer, err.Error(), http.StatusBadRequest)
			return
		}
		if request.Method == http.MethodGet {
			body = []byte(request.URL.Path)
		}
		header := answer.Header()
		// The answer is the same at any time.
		header["Date"] = nil
		header.Set("Content-Type", "application/octet-stream")
		header.Set("Content-Length", strconv.Itoa(len(body)))
		answer.Write(body)
	})
	log.Fatal(http.ListenAndServe(os.Args[1], nil))
}
