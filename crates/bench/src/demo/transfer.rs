//! The client: stock `curl` in a host of the lab.

use std::io::{BufWriter, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, ChildStdin, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::fcntl::{FcntlArg, fcntl};
use sha2::{Digest, Sha256};

use super::synthetic_stream::{SyntheticStream, hex};
use super::{DemoEvent, DemoSpec, EventHandler};
use holdfast_testbed::cluster::{Cluster, priority};

/// Bytes read or written at once.
const CHUNK_BYTES: usize = 64 * 1024;
/// Size of the pipe for `curl`'s output, bytes: the most that an ordinary user may request, and 15 ms at the
/// demonstration's rate.
const PIPE_BYTES: i32 = 1 << 20;
/// Longest delay that an upload makes up for, as the file server does with downloads.
const CATCH_UP_MAX: Duration = Duration::from_millis(20);
/// Interval between progress events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(150);
/// Time without progress after which a transfer has failed (seconds).
const STALL_TIMEOUT_S: &str = "60";

/// Result of a transfer.
pub struct TransferResult {
    /// SHA-256 of the bytes that arrived, in hexadecimal: computed at the client, or reported by the server (upload).
    pub sha256: String,
    /// Bytes that arrived.
    pub bytes: u64,
    /// Duration of the transfer.
    pub elapsed: Duration,
}

/// A running transfer. If dropped, the transfer is ended.
pub struct RunningTransfer {
    child: Child,
    started: Instant,
    total: u64,
    rate_bytes_per_s: u64,
    upload: bool,
}

/// Starts `curl` on the first client.
pub fn start_transfer(
    cluster: &Cluster,
    spec: &DemoSpec,
    server: SocketAddr,
    bytes: u64,
) -> Result<RunningTransfer> {
    let mut command = cluster.lab().command("c1")?;
    command.args(cluster.priority_prefix());
    command.args([
        "curl",
        "-q",
        "--silent",
        "--show-error",
        "--fail",
        "--noproxy",
        "*",
    ]);
    // A handoff that hangs must not hang the demonstration.
    command.args([
        "--connect-timeout",
        STALL_TIMEOUT_S,
        "--speed-limit",
        "1",
        "--speed-time",
        STALL_TIMEOUT_S,
    ]);
    match spec.upload {
        true => command
            .args(["--upload-file", "-"])
            .arg(format!("http://{server}/digest")),
        false => command.arg(format!("http://{server}/synthetic/{bytes}")),
    };
    command.stdin(if spec.upload {
        Stdio::piped()
    } else {
        Stdio::null()
    });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(RunningTransfer {
        child: command.spawn().context("start curl")?,
        started: Instant::now(),
        total: bytes,
        rate_bytes_per_s: u64::from(spec.rate_mbit()) * 125_000,
        upload: spec.upload,
    })
}

impl RunningTransfer {
    /// Runs the transfer to its end.
    ///
    /// # Errors
    /// `curl` failed; the text has its error output.
    pub fn finish(mut self, watch: EventHandler<'_>) -> Result<TransferResult> {
        let messages = self
            .child
            .stderr
            .take()
            .context("curl has no standard error")?;
        let complaints = thread::spawn(move || read_all(messages));
        // The thread at the other end of the pipe must keep up.
        priority::raise_thread_priority();
        let outcome = if self.upload {
            self.send_upload(watch)
        } else {
            self.receive_download(watch)
        };
        let status = self.child.wait().context("wait for curl")?;
        let elapsed = self.started.elapsed();
        if !status.success() {
            let messages = complaints.join().unwrap_or_default();
            bail!("curl failed ({status}): {}", messages.trim());
        }
        let (sha256, bytes) = outcome?;
        Ok(TransferResult {
            sha256,
            bytes,
            elapsed,
        })
    }

    fn receive_download(&mut self, watch: EventHandler<'_>) -> Result<(String, u64)> {
        let mut stdout = self.child.stdout.take().context("curl's output")?;
        // A smaller pipe only makes the transfer slower.
        let _ = fcntl(&stdout, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        let (mut hash, mut bytes) = (Sha256::new(), 0);
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut progress = ProgressReporter::new(self.started, self.total);
        loop {
            let length = stdout.read(&mut buffer)?;
            if length == 0 {
                return Ok((hex(&hash.finalize()), bytes));
            }
            hash.update(&buffer[..length]);
            bytes += length as u64;
            progress.report(bytes, watch);
        }
    }

    fn send_upload(&mut self, watch: EventHandler<'_>) -> Result<(String, u64)> {
        let stdin = self
            .child
            .stdin
            .take()
            .context("curl has no standard input")?;
        // If `curl` fails early, `curl` closes its input; its exit code tells.
        let _ = self.write_stream(stdin, watch);
        let mut stdout = self.child.stdout.take().context("curl's output")?;
        let mut answer = String::new();
        stdout.read_to_string(&mut answer)?;
        let mut words = answer.split_whitespace();
        let digest_and_count = words
            .next()
            .zip(words.next().and_then(|bytes| bytes.parse().ok()));
        let (digest, bytes) = digest_and_count
            .with_context(|| format!("unexpected answer of the server: {answer:?}"))?;
        Ok((digest.to_owned(), bytes))
    }

    /// Writes the stream at its rate.
    fn write_stream(&self, stdin: ChildStdin, watch: EventHandler<'_>) -> std::io::Result<()> {
        let mut stdin = BufWriter::with_capacity(CHUNK_BYTES, stdin);
        let mut source = SyntheticStream::default();
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut progress = ProgressReporter::new(self.started, self.total);
        let mut sent: u64 = 0;
        let mut due = Instant::now();
        while sent < self.total {
            let left = self.total - sent;
            let length = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
            source.fill(&mut buffer[..length]);
            stdin.write_all(&buffer[..length])?;
            sent += length as u64;
            progress.report(sent, watch);
            // A longer delay is not made up for: it is part of the duration of the transfer.
            due = due.max(Instant::now() - CATCH_UP_MAX)
                + Duration::from_secs_f64(length as f64 / self.rate_bytes_per_s as f64);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        stdin.flush()
    }
}

impl Drop for RunningTransfer {
    fn drop(&mut self) {
        // The process has ended already, unless `finish` returned early.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(mut from: ChildStderr) -> String {
    let mut text = String::new();
    // The output before a read error is still useful.
    let _ = from.read_to_string(&mut text);
    text
}

struct ProgressReporter {
    started: Instant,
    total: u64,
    reported_at: Instant,
}

impl ProgressReporter {
    fn new(started: Instant, total: u64) -> Self {
        Self {
            started,
            total,
            reported_at: started,
        }
    }

    fn report(&mut self, bytes: u64, watch: EventHandler<'_>) {
        if self.reported_at.elapsed() >= PROGRESS_INTERVAL || bytes == self.total {
            self.reported_at = Instant::now();
            let elapsed_s = self.started.elapsed().as_secs_f64();
            watch(&DemoEvent::Progress {
                bytes,
                total: self.total,
                elapsed_s,
            });
        }
    }
}
