//! The program that is registered as an element.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use super::process_group;

/// Interval between checks of the program's sockets.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A running program, in its own process group.
pub struct ProgramProcess {
    child: Child,
    group: i32,
}

impl ProgramProcess {
    /// Starts the program of a pool element in a process group of its own.
    ///
    /// # Errors
    /// The program is not found.
    pub fn start(words: &[String]) -> Result<ProgramProcess> {
        let (name, arguments) = words
            .split_first()
            .context("the command names no program")?;
        let child = Command::new(name)
            .args(arguments)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run `{name}`"))?;
        let id = child.id().context("the program has no PID")?;
        Ok(ProgramProcess {
            child,
            group: i32::try_from(id)?,
        })
    }

    /// Returns the process group.
    pub fn group(&self) -> i32 {
        self.group
    }

    /// Waits until the program ends.
    ///
    /// # Errors
    /// Errors of the system.
    pub async fn wait_end(&mut self) -> Result<ExitStatus> {
        Ok(self.child.wait().await?)
    }

    /// Sends a signal to all processes of the group.
    pub fn signal(&self, signal: Signal) {
        // An empty group is no error.
        let _ = killpg(Pid::from_raw(self.group), signal);
    }
}

/// Waits until a program of the process group accepts TCP connections, at `port` if given, otherwise at the port
/// on which it listens; returns the address.
///
/// # Errors
/// The group listens on several ports and none is given.
pub async fn wait_listening(
    group: i32,
    address: Option<IpAddr>,
    port: Option<u16>,
) -> Result<SocketAddr> {
    loop {
        if let Some(at) = listening_address(group, address, port)?
            && TcpStream::connect(reachable(at)).await.is_ok()
        {
            return Ok(at);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn listening_address(
    group: i32,
    address: Option<IpAddr>,
    port: Option<u16>,
) -> Result<Option<SocketAddr>> {
    let mut addresses = process_group::listeners(group);
    addresses.retain(|at| port.is_none_or(|port| at.port() == port));
    let ports: std::collections::BTreeSet<u16> = addresses.iter().map(SocketAddr::port).collect();
    if ports.len() > 1 {
        bail!("the program listens at ports {ports:?}; choose the pool's with --port");
    }
    // Prefer a listener on all addresses. A program that left the group may listen too, unseen here.
    let wildcard = addresses.iter().find(|at| at.ip().is_unspecified());
    let chosen = wildcard.or(addresses.first()).copied();
    let unlisted_port = port.map(|port| (Ipv4Addr::UNSPECIFIED, port).into());
    Ok(chosen
        .or(unlisted_port)
        .map(|at: SocketAddr| match address {
            Some(address) => SocketAddr::new(address, at.port()),
            None => at,
        }))
}

/// Returns the address at which this process can connect.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => {
            (std::net::Ipv6Addr::LOCALHOST, address.port()).into()
        }
        _ => address,
    }
}
