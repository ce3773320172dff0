// Take messages from the queue `emails` until none comes for two seconds.
package main

import (
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
	for {
		answer, err := http.Get(server + "/queues/emails/dequeue?timeout=2")
		if err != nil {
			log.Fatal(err)
		}
		var message struct {
			Payload struct{ To string }
		}
		switch answer.StatusCode {
		case http.StatusNoContent:
			return
		case http.StatusOK:
			err = json.NewDecoder(answer.Body).Decode(&message)
		default:
			err = fmt.Errorf("the broker said %s", answer.Status)
		}
		answer.Body.Close()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("got", message.Payload.To)
	}
}
