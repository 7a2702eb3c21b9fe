//! Recording with `tcpdump` in a host of a lab.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_lab::Lab;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Recorded bytes per packet: enough for Ethernet, IPv6 and TCP with all options.
const SNAPSHOT_BYTES: &str = "128";
/// Size of the kernel's ring, KiB.
const RING_KIB: &str = "32768";
/// The discard port (RFC 863): a packet to this port marks the end of a recording.
const MARKER_PORT: u16 = 9;
/// Time limit of every wait for `tcpdump`; the machine may be very busy.
const TCPDUMP_TIMEOUT: Duration = Duration::from_secs(60);

/// A running packet capture. If dropped, the recording ends without a result.
pub struct RunningCapture<'a> {
    lab: &'a Lab,
    host: String,
    file: PathBuf,
    child: Child,
    messages: BufReader<ChildStderr>,
}

/// A finished packet capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// The file, in the classic pcap format with nanoseconds.
    pub file: PathBuf,
    /// Packets in the file, including the marker at its end.
    pub packets: u64,
}

impl<'a> RunningCapture<'a> {
    /// Starts to record packets that pass `eth0` of `host` and match `filter` (pcap-filter(7)); returns when the
    /// recording has begun.
    ///
    /// # Errors
    /// `tcpdump` is missing or refuses.
    pub fn start(lab: &'a Lab, host: &str, filter: &str, file: &Path) -> Result<Self> {
        let mut command = lab.command(host)?;
        command.args(["tcpdump", "-i", "eth0", "-n", "-U", "-Z", "root"]);
        command.args([
            "-s",
            SNAPSHOT_BYTES,
            "-B",
            RING_KIB,
            "--time-stamp-precision=nano",
            "-w",
        ]);
        command
            .arg(file)
            .arg(format!("({filter}) or (udp dst port {MARKER_PORT})"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("start tcpdump")?;
        let messages = child
            .stderr
            .take()
            .context("tcpdump has no standard error")?;
        let mut capture = Self {
            lab,
            host: host.into(),
            file: file.into(),
            child,
            messages: BufReader::new(messages),
        };
        capture.wait_until_listening()?;
        Ok(capture)
    }

    fn wait_until_listening(&mut self) -> Result<()> {
        let mut output = String::new();
        loop {
            let before = output.len();
            if self.messages.read_line(&mut output)? == 0 {
                bail!(
                    "tcpdump (Debian package tcpdump) did not start: {}",
                    output.trim()
                );
            }
            if output[before..].contains("listening on") {
                return Ok(());
            }
        }
    }

    /// Ends the recording, once every packet that has passed is in the file.
    ///
    /// # Errors
    /// The kernel dropped packets, so that the file is incomplete; or `tcpdump` failed.
    pub fn finish(mut self) -> Result<Recording> {
        self.mark_end()?;
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)
            .context("stop tcpdump")?;
        let mut output = String::new();
        self.messages.read_to_string(&mut output)?;
        let status = self.child.wait()?;
        let dropped = parse_packet_count(&output, "dropped by kernel");
        let packets = parse_packet_count(&output, "captured");
        match (packets, dropped) {
            (Some(packets), Some(0)) if status.success() => Ok(Recording {
                file: self.file.clone(),
                packets,
            }),
            (_, Some(dropped)) if dropped > 0 => bail!(
                "the capture is incomplete: the kernel dropped {dropped} packets; the machine was too busy, try again"
            ),
            _ => bail!("tcpdump failed ({status}): {}", output.trim()),
        }
    }

    /// Sends a unique packet and waits until the file has it: all earlier packets are in the file by then.
    fn mark_end(&mut self) -> Result<()> {
        let marker = format!("holdfast capture ends {:?}", Instant::now());
        let (v4, _) = self
            .lab
            .plan()
            .router_addresses(self.lab.host(&self.host)?.segment);
        let deadline = Instant::now() + TCPDUMP_TIMEOUT;
        let mut file = File::open(&self.file).context("open the capture")?;
        let mut read_from = file.seek(SeekFrom::End(0))?;
        let send = || -> std::io::Result<()> {
            let socket = UdpSocket::bind((IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0))?;
            socket.send_to(marker.as_bytes(), SocketAddr::new(v4.into(), MARKER_PORT))?;
            Ok(())
        };
        self.lab
            .run_in_net_namespace(&self.host, send)?
            .context("send the marker")?;
        while !has_marker(&mut file, marker.as_bytes(), &mut read_from)? {
            if Instant::now() > deadline || self.child.try_wait()?.is_some() {
                bail!("tcpdump stopped recording before the end");
            }
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for RunningCapture<'_> {
    fn drop(&mut self) {
        // A process that `finish` has ended is not affected.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Searches the bytes added since the last call. A busy connection may have written much after the marker.
fn has_marker(file: &mut File, marker: &[u8], read_from: &mut u64) -> Result<bool> {
    let kept = &marker[..marker.len().min(80)];
    file.seek(SeekFrom::Start(*read_from))?;
    let mut new = Vec::new();
    file.read_to_end(&mut new)?;
    // The end of the file may cut the marker in two.
    *read_from += new.len().saturating_sub(kept.len()) as u64;
    Ok(new.windows(kept.len()).any(|window| window == kept))
}

/// Returns the number before `words` in the final output of `tcpdump`: `12 packets captured`.
fn parse_packet_count(output: &str, words: &str) -> Option<u64> {
    let line = output.lines().find(|line| line.ends_with(words))?;
    line.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parse_packet_count;

    #[test]
    fn final_output_of_tcpdump_is_parsed() {
        let said =
            "12 packets captured\n14 packets received by filter\n2 packets dropped by kernel\n";
        assert_eq!(parse_packet_count(said, "captured"), Some(12));
        assert_eq!(parse_packet_count(said, "dropped by kernel"), Some(2));
        assert_eq!(parse_packet_count("1 packet captured", "captured"), Some(1));
        assert_eq!(parse_packet_count("", "captured"), None);
    }
}
