# Put three messages into the queue `emails`.
require "json"
require "net/http"

server = ENV.fetch("MILLSTREAM_SERVER", "http://127.0.0.1:8080")
uri = URI("#{server}/queues/emails/enqueue")

%w[ada bob eve].each do |user|
  body = { payload: { to: "#{user}@example.com" } }.to_json
  answer = Net::HTTP.post(uri, body, "Content-Type" => "application/json")
  abort answer.body unless answer.is_a?(Net::HTTPOK)
  puts "sent #{user}@example.com"
end
