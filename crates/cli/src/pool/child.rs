//! The program that is registered as an element.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use super::ports;

/// Interval between checks of the program's sockets.
const LOOK: Duration = Duration::from_millis(20);

/// A running program, in its own process group.
pub struct Program {
    child: Child,
    group: i32,
}

impl Program {
    /// Starts the program.
    ///
    /// # Errors
    /// The program is not found.
    pub fn start(words: &[String]) -> Result<Program> {
        let (name, arguments) = words.split_first().context("no program is named")?;
        let child = Command::new(name)
            .args(arguments)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run `{name}`"))?;
        let id = child.id().context("the program's number")?;
        Ok(Program {
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
    pub async fn ended(&mut self) -> Result<ExitStatus> {
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
pub async fn accepts(group: i32, address: Option<IpAddr>, port: Option<u16>) -> Result<SocketAddr> {
    loop {
        if let Some(at) = candidate(group, address, port)?
            && TcpStream::connect(reachable(at)).await.is_ok()
        {
            return Ok(at);
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn candidate(group: i32, address: Option<IpAddr>, port: Option<u16>) -> Result<Option<SocketAddr>> {
    let mut found = ports::listeners(group);
    found.retain(|at| port.is_none_or(|port| at.port() == port));
    let ports: std::collections::BTreeSet<u16> = found.iter().map(SocketAddr::port).collect();
    if ports.len() > 1 {
        bail!("the program listens at ports {ports:?}; say which is the pool's with --port");
    }
    // Prefer a listener on all addresses. A program that left the group may listen too, unseen here.
    let any = found.iter().find(|at| at.ip().is_unspecified());
    let own = any.or(found.first()).copied();
    let unseen = port.map(|port| (Ipv4Addr::UNSPECIFIED, port).into());
    Ok(own.or(unseen).map(|at: SocketAddr| match address {
        Some(address) => SocketAddr::new(address, at.port()),
        None => at,
    }))
}

/// Returns the address at which this process can connect.
fn reachable(at: SocketAddr) -> SocketAddr {
    match at.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, at.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (std::net::Ipv6Addr::LOCALHOST, at.port()).into(),
        _ => at,
    }
}
