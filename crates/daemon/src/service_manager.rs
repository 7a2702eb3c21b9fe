//! Reports to the service manager that started the daemon, by the protocol of `sd_notify(3)`. Without a service manager,
//! the functions have no effect.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Environment variable with the path of the service manager's socket; a leading `@` stands for a NUL, as of an
/// abstract socket.
const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";

/// Reports that the daemon serves.
pub fn report_ready() {
    report("READY=1");
}

/// Reports that the daemon has begun to stop.
pub fn report_stopping() {
    report("STOPPING=1");
}

/// Reports the reason for which the daemon ends, which `systemctl status` shows. Only the first line of `reason` counts.
pub fn report_failure(reason: &str) {
    let line = reason.lines().next().unwrap_or_default();
    report(&format!("STATUS={line}"));
}

fn report(message: &str) {
    let Some(path) = std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty()) else {
        return;
    };
    if let Err(error) = send(&path, message) {
        tracing::warn!(%error, "cannot report to the service manager");
    }
}

fn send(path: &OsStr, message: &str) -> io::Result<()> {
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(path)?,
    };
    let sent = UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address)?;
    match sent == message.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_arrives_at_file_and_abstract_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("@holdfast-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
        let managers = [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str()),
            (
                UnixDatagram::bind_addr(&abstract_address).unwrap(),
                OsStr::new(&name),
            ),
        ];
        for (manager, address) in managers {
            send(address, "READY=1").unwrap();
            let mut buffer = [0; 64];
            let length = manager.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"READY=1");
        }
        send(folder.path().join("absent").as_os_str(), "READY=1").unwrap_err();
    }
}
