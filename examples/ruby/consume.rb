# Take messages from the queue `emails` until none comes for two seconds.
require "json"
require "net/http"

server = ENV.fetch("MILLSTREAM_SERVER", "http://127.0.0.1:8080")
uri = URI("#{server}/queues/emails/dequeue?timeout=2")

loop do
  answer = Net::HTTP.get_response(uri)
  break if answer.is_a?(Net::HTTPNoContent)
  abort answer.body unless answer.is_a?(Net::HTTPOK)
  puts "got #{JSON.parse(answer.body)['payload']['to']}"
end
