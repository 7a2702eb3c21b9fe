//! Captures of the traffic of a lab's hosts, checked by `scripts/captures.sh`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_lab::Lab;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Environment variables for the folder and for the beginning of the files' names.
const CAPTURE_FOLDER_VARIABLE: &str = "HOLDFAST_CAPTURES";
const CAPTURE_NAME_VARIABLE: &str = "HOLDFAST_CAPTURE";
/// Time limit for the start of `tcpdump`; the machine may be very busy.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which `tcpdump` has written its buffered packets to the file.
const FLUSH_DELAY: Duration = Duration::from_secs(1);

/// One `tcpdump` process per host, outside the hosts' process namespaces, so that killing all processes of a host does
/// not end the capture.
#[derive(Default)]
pub(super) struct SctpCaptures(Vec<Child>);

impl SctpCaptures {
    /// Captures SCTP at all hosts, if `./x test` requests captures.
    pub(super) fn start(lab: &Lab) -> Result<SctpCaptures> {
        let mut captures = SctpCaptures::default();
        if let (Some(folder), Ok(name)) = (
            std::env::var_os(CAPTURE_FOLDER_VARIABLE),
            std::env::var(CAPTURE_NAME_VARIABLE),
        ) {
            for host in lab.hosts() {
                let file = format!("{name}@{}.{}.pcap", lab.name(), host.name);
                captures.start_capture(lab, &host.name, &Path::new(&folder).join(file))?;
            }
        }
        Ok(captures)
    }

    fn start_capture(&mut self, lab: &Lab, host: &str, file: &PathBuf) -> Result<()> {
        // Segmentation offload would show dozens of packets as one, at sender and receiver.
        for (device, what) in [
            ("lo", &["tx-udp-segmentation"][..]),
            ("eth0", &["tx-udp-segmentation", "gro"]),
        ] {
            for feature in what {
                let mut ethtool = Command::new("ethtool");
                ethtool.args(["-K", device, feature, "off"]);
                let output = lab
                    .run_in_net_namespace(host, || ethtool.output())?
                    .context("run ethtool")?;
                let said = String::from_utf8_lossy(&output.stderr);
                ensure!(
                    output.status.success(),
                    "ethtool failed at {host}: {}",
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
            .run_in_net_namespace(host, || tcpdump.spawn())?
            .context("run tcpdump")?;
        self.0.push(child);
        let deadline = Instant::now() + START_TIMEOUT;
        while std::fs::metadata(file).map_or(0, |file| file.len()) == 0 {
            if Instant::now() > deadline {
                bail!("tcpdump did not start to record at {host}");
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for SctpCaptures {
    fn drop(&mut self) {
        if self.0.is_empty() {
            return;
        }
        sleep(FLUSH_DELAY);
        for child in &mut self.0 {
            // The child was not waited for yet, so the process id is still its own.
            let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT);
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}
