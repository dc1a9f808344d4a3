"""
A stand-in for a vLLM server in a process of its own: the routes that TRL's client and this package call. It logs what
it was asked for, in order, and can hang in `/update_weights` (to be killed there).

    python fake_server.py PORT_FILE SETTINGS_JSON
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    settings = json.loads(sys.argv[2])
    log: list = []
    drafts = [0]
    paths = ["/start_weight_update", "/update_weights", "/finish_weight_update", *settings.get("paths", [])]
    speculation = settings.get("speculative_config", {"method": "eagle3", "num_speculative_tokens": 3})
    replies = {
        "/health": {},
        "/v1/models": {"data": [{"id": "policy"}]},
        "/server_info": {
            "vllm_config": {
                "speculative_config": speculation,
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "weight_transfer_config": {"backend": "nccl"},
            }
        },
        "/openapi.json": {"paths": {path: {} for path in paths}},
    }

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def reply(self, body, kind="application/json"):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            path = self.path.split("?")[0]
            if path == "/log":
                self.reply(json.dumps(log).encode())
            elif path == "/metrics":
                drafts[0] += 10
                lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts."]
                for engine in (0, 1):
                    labels = f'engine="{engine}",model_name="policy"'
                    lines += [
                        f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts[0]}.0",
                        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {3 * drafts[0]}.0",
                        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {1.5 * drafts[0]}",
                        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
                    ]
                    lines += [
                        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} '
                        f"{drafts[0] * (1.0 - i / 2)}"
                        for i in range(3)
                    ]
                self.reply("\n".join(lines).encode(), "text/plain")
            else:
                self.reply(json.dumps(replies[path]).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            log.append([self.path, body.get("update_info", {}).get("names", [])])
            if self.path == "/update_weights" and settings.get("hang"):
                time.sleep(600)
            self.reply(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Path(sys.argv[1]).write_text(str(server.server_port))
    server.serve_forever()


if __name__ == "__main__":
    main()
