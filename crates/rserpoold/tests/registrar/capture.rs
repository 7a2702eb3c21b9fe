//! Captures of a test's packets in its own network namespace, for `scripts/captures.sh`.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::TIMEOUT;

/// A capture that ends with the test.
pub struct Capture(Child);

impl Capture {
    /// Captures all interfaces of this thread's network namespace, if `./x test` asks for captures.
    pub fn start(name: &str) -> Option<Self> {
        let folder = std::env::var_os("HOLDFAST_CAPTURES")?;
        let file = Path::new(&folder).join(format!("{name}.pcap"));
        let mut tcpdump = Command::new("tcpdump");
        tcpdump.args(["-i", "any", "-U", "-Z", "root", "-w"]);
        tcpdump.arg(&file).args(["udp or ip proto 132"]);
        let capture = Self(tcpdump.spawn().expect("the program tcpdump"));
        let deadline = Instant::now() + TIMEOUT;
        while std::fs::metadata(&file).map_or(0, |file| file.len()) == 0 {
            assert!(
                Instant::now() < deadline,
                "exceeded time: tcpdump does not begin"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(capture)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // Time for tcpdump to write its buffered packets.
        std::thread::sleep(Duration::from_secs(1));
        if let Ok(id) = i32::try_from(self.0.id()) {
            let _ = kill(Pid::from_raw(id), Signal::SIGINT);
        }
        let _ = self.0.wait();
    }
}
