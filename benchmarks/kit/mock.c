// Mock vLLM instances for benchmarks: all of them in one epoll thread, so cheap that what is measured is the router.
//
//   mock BASE_PORT COUNT        listens on 127.0.0.1, ports BASE_PORT .. BASE_PORT + COUNT - 1, until it is killed
//
// A request says in its own body how it is answered: "stream" as everywhere; "max_tokens": chunks of a stream;
// "seed": milliseconds between them, on one time grid for all streams as an engine's steps make them (0: as fast as the
// socket takes them). Answers have the shape of vLLM's. No model, no queue, no cache.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_INSTANCES = 64, MAX_EVENTS = 512, READ_SIZE = 65536 };

typedef struct {
  char *bytes;
  size_t length, capacity;
} Buffer;

typedef struct Connection {
  int fd, instance, is_listener, wants_write, close_after;
  Buffer in, body, out;     // received; a chunked body decoded; not yet sent
  size_t sent;              // of `out`
  size_t head, next_chunk;  // length of the request's head once it is whole, else 0; where a chunked body goes on
  long long content_length;
  int chunked;
  int streaming, chunk, chunks, usage;
  long long interval_ns, due_ns;
  struct Connection *previous_stream, *next_stream;
} Connection;

static int poller, running[MAX_INSTANCES];
static Connection *streams;
static Connection *closed;  // linked by next_stream; freed after the round: events of it may still refer to them

#define ID "\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"created\":1764450000,\"model\":\"m\""
static const char ANSWER[] =
    "{" ID ",\"object\":\"chat.completion\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
    "\"content\":\"Hello there\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":10,"
    "\"total_tokens\":13,\"completion_tokens\":3}}";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1764450000,\"owned_by\":\"vllm\","
    "\"root\":\"m\",\"parent\":null,\"max_model_len\":1048576}]}";

// Further questions of routers to an instance, and the answers.
static const struct {
  const char *path, *type, *body;
} PAGES[] = {
    {"/health", "text/plain", ""},
    {"/version", "application/json", "{\"version\":\"0.13.0\"}"},
    {"/v1/models", "application/json", MODELS},
    {"/model_info", "application/json", "{\"model_path\":\"m\",\"is_generation\":true}"},
    {"/get_model_info", "application/json", "{\"model_path\":\"m\",\"is_generation\":true}"},
    {"/server_info", "application/json", "{\"model_id\":\"m\",\"served_model_name\":\"m\",\"dp_size\":1}"},
    {"/get_server_info", "application/json", "{\"model_id\":\"m\",\"served_model_name\":\"m\",\"dp_size\":1}"},
};

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void append(Buffer *buffer, const char *bytes, size_t length) {
  if (buffer->length + length > buffer->capacity) {
    buffer->capacity = 2 * (buffer->length + length);
    buffer->bytes = realloc(buffer->bytes, buffer->capacity);
  }
  memcpy(buffer->bytes + buffer->length, bytes, length);
  buffer->length += length;
}

static void end_stream(Connection *c) {
  *(c->previous_stream ? &c->previous_stream->next_stream : &streams) = c->next_stream;
  if (c->next_stream) c->next_stream->previous_stream = c->previous_stream;
  c->streaming = 0;
  running[c->instance]--;
}

static void close_connection(Connection *c) {
  if (c->fd < 0) return;
  if (c->streaming) end_stream(c);
  close(c->fd);
  c->fd = -1;
  c->next_stream = closed;
  closed = c;
}

static void want_write(Connection *c, int wanted) {
  if (c->wants_write == wanted) return;
  c->wants_write = wanted;
  struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void flush(Connection *c) {
  while (c->fd >= 0 && c->sent < c->out.length) {
    ssize_t n = send(c->fd, c->out.bytes + c->sent, c->out.length - c->sent, MSG_NOSIGNAL);
    if (n >= 0) {
      c->sent += n;
    } else if (errno == EAGAIN) {
      want_write(c, 1);
      return;
    } else {
      close_connection(c);
    }
  }
  if (c->fd < 0) return;
  c->sent = c->out.length = 0;
  want_write(c, 0);
  if (c->close_after && !c->streaming) close_connection(c);
}

static void answer(Connection *c, int status, const char *type, const char *body) {
  char head[256];
  int n = snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n%s\r\n", status,
                   status == 200 ? "OK" : "Not Found", type, strlen(body), c->close_after ? "connection: close\r\n" : "");
  append(&c->out, head, n);
  append(&c->out, body, strlen(body));
  flush(c);
}

static void append_event(Connection *c, const char *data) {
  char size[24];
  append(&c->out, size, snprintf(size, sizeof size, "%zx\r\n", strlen(data) + 8));
  append(&c->out, "data: ", 6);
  append(&c->out, data, strlen(data));
  append(&c->out, "\n\n\r\n", 4);
}

// The next chunk of a stream in one write, with what ends the stream behind the last one. A chunk's text is the time it
// was sent at, so that a client on this machine can tell how long it was on its way.
static void send_chunk(Connection *c) {
  char event[512];
  snprintf(event, sizeof event,
           "{" ID ",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t=%019lld\"},"
           "\"logprobs\":null,\"finish_reason\":null}]}", now_ns());
  append_event(c, event);
  c->due_ns += c->interval_ns;
  if (++c->chunk == c->chunks) {
    append_event(c, "{" ID ",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},"
                    "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}]}");
    if (c->usage) {
      snprintf(event, sizeof event,
               "{" ID ",\"object\":\"chat.completion.chunk\",\"choices\":[],\"usage\":{\"prompt_tokens\":10,"
               "\"total_tokens\":%d,\"completion_tokens\":%d}}", 10 + c->chunks, c->chunks);
      append_event(c, event);
    }
    append_event(c, "[DONE]");
    append(&c->out, "0\r\n\r\n", 5);
    end_stream(c);
  }
  flush(c);
}

// The number or truth behind "key": near the end of a body, where clients put it.
static long long number_in(const char *body, size_t length, const char *key, long long otherwise) {
  size_t tail = length < 4096 ? length : 4096;
  const char *end = body + length, *at = memmem(end - tail, tail, key, strlen(key));
  if (!at) return otherwise;
  for (at += strlen(key); at < end && (*at == ':' || *at == ' ');) at++;
  return end - at >= 4 && !memcmp(at, "true", 4) ? 1 : strtoll(at, NULL, 10);
}

static void start_stream(Connection *c, const char *body, size_t length) {
  char head[256];
  append(&c->out, head, snprintf(head, sizeof head,
         "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n%stransfer-encoding: chunked\r\n\r\n",
         c->close_after ? "connection: close\r\n" : ""));
  c->chunk = 0;
  c->chunks = number_in(body, length, "\"max_tokens\"", 64);
  c->interval_ns = number_in(body, length, "\"seed\"", 0) * 1000000;
  c->usage = number_in(body, length, "\"include_usage\"", 0);
  c->due_ns = now_ns();
  if (c->interval_ns) c->due_ns -= c->due_ns % c->interval_ns;
  c->previous_stream = NULL;
  c->next_stream = streams;
  if (streams) streams->previous_stream = c;
  streams = c;
  c->streaming = 1;
  running[c->instance]++;
  send_chunk(c);
}

static void respond(Connection *c, const char *body, size_t length) {
  char method[8] = "", path[128] = "", page[1024];
  sscanf(c->in.bytes, "%7s %127[^ ?]", method, path);
  if (!strcmp(method, "POST") && !strcmp(path, "/v1/chat/completions")) {
    if (number_in(body, length, "\"stream\"", 0)) start_stream(c, body, length);
    else answer(c, 200, "application/json", ANSWER);
    return;
  }
  if (!strcmp(path, "/metrics")) {
    snprintf(page, sizeof page,
             "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"m\"} %d.0\n"
             "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0.0\n"
             "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n",
             running[c->instance]);
    answer(c, 200, "text/plain; version=0.0.4; charset=utf-8", page);
    return;
  }
  for (size_t i = 0; i < sizeof PAGES / sizeof *PAGES; i++)
    if (!strcmp(path, PAGES[i].path)) {
      answer(c, 200, PAGES[i].type, PAGES[i].body);
      return;
    }
  answer(c, 404, "application/json", "{\"detail\":\"Not Found\"}");
}

// Reads what the head says of the body; 0 while the head is not whole.
static int read_head(Connection *c) {
  char *end = memmem(c->in.bytes, c->in.length, "\r\n\r\n", 4);
  if (!end) return 0;
  c->head = end + 4 - c->in.bytes;
  c->next_chunk = c->head;
  c->content_length = c->chunked = c->close_after = 0;
  c->body.length = 0;
  for (char *line = c->in.bytes; line < end; line = (char *)memmem(line, end + 2 - line, "\r\n", 2) + 2) {
    if (!strncasecmp(line, "content-length:", 15)) c->content_length = atoll(line + 15);
    else if (!strncasecmp(line, "transfer-encoding:", 18)) c->chunked = 1;
    else if (!strncasecmp(line, "connection: close", 17)) c->close_after = 1;
  }
  return 1;
}

// Decodes what has come of a chunked body; 0 while it is not whole.
static int read_chunked(Connection *c) {
  for (;;) {
    char *at = c->in.bytes + c->next_chunk;
    size_t there = c->in.length - c->next_chunk;
    char *line_end = memmem(at, there < 32 ? there : 32, "\r\n", 2);
    if (!line_end) return 0;
    size_t size = strtoul(at, NULL, 16), whole = (line_end - at) + 2 + size + 2;
    if (there < whole) return 0;
    append(&c->body, line_end + 2, size);
    c->next_chunk += whole;
    if (!size) return 1;
  }
}

// Answers every request that has come whole; the next one waits while a stream is on.
static void process(Connection *c) {
  while (c->fd >= 0 && !c->streaming && c->in.length) {
    if (!c->head && !read_head(c)) return;
    size_t used = c->head + c->content_length;
    if (c->chunked) {
      if (!read_chunked(c)) return;
      used = c->next_chunk;
    } else if (c->in.length < used) {
      return;
    }
    if (c->chunked) respond(c, c->body.bytes, c->body.length);
    else respond(c, c->in.bytes + c->head, c->content_length);
    memmove(c->in.bytes, c->in.bytes + used, c->in.length -= used);
    c->head = 0;
  }
}

static void watch(int fd, int instance, int is_listener) {
  Connection *c = calloc(1, sizeof *c);
  c->fd = fd;
  c->instance = instance;
  c->is_listener = is_listener;
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

static void on_event(Connection *c, unsigned events) {
  int one = 1, fd;
  if (c->is_listener) {
    while ((fd = accept4(c->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      watch(fd, c->instance, 0);
    }
    return;
  }
  if (events & EPOLLOUT) flush(c);
  if (c->fd < 0 || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
  static char bytes[READ_SIZE];
  ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
  if (n > 0) {
    append(&c->in, bytes, n);
    process(c);
  } else if (n == 0 || errno != EAGAIN) {
    close_connection(c);
  }
}

static int milliseconds_to_next_chunk(void) {
  long long due = -1, now = now_ns();
  for (Connection *c = streams; c; c = c->next_stream)
    if (!c->out.length && (due < 0 || c->due_ns < due)) due = c->due_ns;
  return due < 0 ? -1 : due <= now ? 0 : (int)((due - now + 999999) / 1000000);
}

int main(int argc, char **argv) {
  int base = argc == 3 ? atoi(argv[1]) : 0, count = argc == 3 ? atoi(argv[2]) : 0, one = 1;
  if (base <= 0 || count <= 0 || count > MAX_INSTANCES) {
    fprintf(stderr, "usage: mock BASE_PORT COUNT (at most %d)\n", MAX_INSTANCES);
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  poller = epoll_create1(0);
  for (int i = 0; i < count; i++) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in at = {AF_INET, htons(base + i), {htonl(INADDR_LOOPBACK)}, {0}};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 4096)) {
      perror("mock: cannot listen");
      return 1;
    }
    watch(fd, i, 1);
  }
  struct epoll_event events[MAX_EVENTS];
  for (;;) {
    int n = epoll_wait(poller, events, MAX_EVENTS, milliseconds_to_next_chunk());
    for (int i = 0; i < n; i++)
      if (((Connection *)events[i].data.ptr)->fd >= 0) on_event(events[i].data.ptr, events[i].events);
    long long now = now_ns();
    for (Connection *c = streams, *next; c; c = next) {
      next = c->next_stream;
      if (c->out.length || c->due_ns > now) continue;
      send_chunk(c);
      process(c);
    }
    while (closed) {
      Connection *c = closed;
      closed = c->next_stream;
      free(c->in.bytes), free(c->body.bytes), free(c->out.bytes), free(c);
    }
  }
}
