// Put three messages into the queue `emails`.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
)

func main() {
	server := os.Getenv("MILLSTREAM_SERVER")
	if server == "" {
		server = "http://127.0.0.1:8080"
	}
	for _, user := range []string{"ada", "bob", "eve"} {
		to := user + "@example.com"
		body, _ := json.Marshal(map[string]any{"payload": map[string]string{"to": to}})
		url := server + "/queues/emails/enqueue"
		answer, err := http.Post(url, "application/json", bytes.NewReader(body))
		if err != nil {
			log.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			log.Fatal(answer.Status)
		}
		fmt.Println("sent", to)
	}
}
