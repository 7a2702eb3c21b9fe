//! What a lab's hosts say, for `scripts/captures.sh` to look at.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_lab::Lab;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The folder, and what the files' names begin with.
const FOLDER: &str = "HOLDFAST_CAPTURES";
const NAME: &str = "HOLDFAST_CAPTURE";
/// Until `tcpdump` has to have begun; the machine may be very busy.
const LIMIT: Duration = Duration::from_secs(60);
/// What is still in its buffer is in the file then.
const BUFFERED: Duration = Duration::from_secs(1);

/// One `tcpdump` for each host. They are no processes of the hosts: whoever kills all that runs in one does not end them.
#[derive(Default)]
pub(super) struct Captures(Vec<Child>);

impl Captures {
    /// Captures SCTP at all hosts, if `./x test` wants it.
    pub(super) fn start(lab: &Lab) -> Result<Captures> {
        let mut captures = Captures::default();
        if let (Some(folder), Ok(name)) = (std::env::var_os(FOLDER), std::env::var(NAME)) {
            for host in lab.hosts() {
                let file = format!("{name}@{}.{}.pcap", lab.name(), host.name);
                captures.add(lab, &host.name, &Path::new(&folder).join(file))?;
            }
        }
        Ok(captures)
    }

    fn add(&mut self, lab: &Lab, host: &str, file: &PathBuf) -> Result<()> {
        // Neither sender nor receiver shall show dozens of packets as one.
        for (device, what) in [
            ("lo", &["tx-udp-segmentation"][..]),
            ("eth0", &["tx-udp-segmentation", "gro"]),
        ] {
            for feature in what {
                let mut ethtool = Command::new("ethtool");
                ethtool.args(["-K", device, feature, "off"]);
                let output = lab
                    .in_net(host, || ethtool.output())?
                    .context("run ethtool")?;
                let said = String::from_utf8_lossy(&output.stderr);
                ensure!(
                    output.status.success(),
                    "ethtool at {host}: {}",
                    said.trim()
                );
            }
        }
        let mut tcpdump = Command::new("tcpdump");
        tcpdump.args(["-i", "any", "-U", "-B", "16384", "-Z", "root", "-w"]);
        tcpdump
            .arg(file)
            .arg("udp or ip proto 132 or ip6 proto 132");
        tcpdump.stdin(Stdio::null()).stderr(Stdio::null());
        let child = lab
            .in_net(host, || tcpdump.spawn())?
            .context("run tcpdump")?;
        self.0.push(child);
        let deadline = Instant::now() + LIMIT;
        while std::fs::metadata(file).map_or(0, |file| file.len()) == 0 {
            if Instant::now() > deadline {
                bail!("tcpdump does not begin at {host}");
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Captures {
    fn drop(&mut self) {
        if self.0.is_empty() {
            return;
        }
        sleep(BUFFERED);
        for child in &mut self.0 {
            // Not yet waited for, so the number is still its own.
            let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT);
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}
