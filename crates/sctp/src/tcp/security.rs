//! TLS of connections: the provider of TLS sessions, and the layer between a socket and its plain data.

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::fmt::Debug;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;

/// Provider of certificates and admission rules.
pub trait TlsSecurity: Send + Sync + Debug {
    /// Makes the TLS session of an outgoing connection.
    ///
    /// # Errors
    /// Errors of the TLS library.
    fn client_session(&self) -> Result<ClientConnection, rustls::Error>;

    /// Makes the TLS session of an incoming connection.
    ///
    /// # Errors
    /// Errors of the TLS library.
    fn server_session(&self) -> Result<ServerConnection, rustls::Error>;

    /// Returns the name of the peer with this certificate chain (its own certificate first). Called after the
    /// handshake, and again when the security has changed.
    ///
    /// # Errors
    /// The reason that the peer is not admitted.
    fn admitted_name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String>;
}

/// Layer above the socket.
pub(super) enum SecurityLayer {
    Plain,
    Tls(Box<Connection>),
}

/// Result of a read.
pub(super) enum ReadOutcome {
    Bytes(usize),
    /// No more data is available at present.
    Pending,
    /// The other side has finished sending.
    End,
}

impl SecurityLayer {
    /// Reads decrypted data that is buffered into `buffer`; if there is none and `may_read` is set, reads once from the
    /// socket.
    pub(super) fn read(
        &mut self,
        socket: &mut TcpStream,
        buffer: &mut [u8],
        may_read: bool,
    ) -> io::Result<ReadOutcome> {
        let SecurityLayer::Tls(tls) = self else {
            return match may_read {
                true => read_outcome(socket.read(buffer)),
                false => Ok(ReadOutcome::Pending),
            };
        };
        match read_outcome(tls.reader().read(buffer))? {
            ReadOutcome::Pending if may_read => {}
            other => return Ok(other),
        }
        match read_outcome(tls.read_tls(socket))? {
            ReadOutcome::Pending => return Ok(ReadOutcome::Pending),
            ReadOutcome::End => {
                return match tls.reader().read(buffer) {
                    // An end of the socket without a TLS close may be forged by anyone; the reader reports it as an
                    // error.
                    Ok(0) => Ok(ReadOutcome::End),
                    Ok(length) => Ok(ReadOutcome::Bytes(length)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        Err(io::ErrorKind::UnexpectedEof.into())
                    }
                    Err(error) => Err(error),
                };
            }
            ReadOutcome::Bytes(_) => {}
        }
        if let Err(error) = tls.process_new_packets() {
            // The alert tells the other side the reason, if the socket has buffer space.
            let _ = tls.write_tls(socket);
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                error.to_string(),
            ));
        }
        match read_outcome(tls.reader().read(buffer))? {
            // The record had no content for the application, such as a handshake record.
            ReadOutcome::Pending => Ok(ReadOutcome::Bytes(0)),
            other => Ok(other),
        }
    }

    /// Writes as much of `out` as the socket accepts. Returns the number of bytes written, and true if TLS records
    /// remain buffered.
    pub(super) fn write(
        &mut self,
        socket: &mut TcpStream,
        out: &[IoSlice<'_>],
    ) -> io::Result<(usize, bool)> {
        let SecurityLayer::Tls(tls) = self else {
            let written = match out.iter().all(|slice| slice.is_empty()) {
                true => Ok(0),
                false => socket.write_vectored(out),
            };
            return Ok((zero_if_would_block(written)?, false));
        };
        let written = match tls.is_handshaking() {
            true => 0,
            false => tls.writer().write_vectored(out)?,
        };
        while tls.wants_write() {
            if zero_if_would_block(tls.write_tls(socket))? == 0 {
                return Ok((written, true));
            }
        }
        Ok((written, false))
    }

    /// Sends the TLS close notification.
    pub(super) fn send_close_notify(&mut self) {
        if let SecurityLayer::Tls(tls) = self {
            tls.send_close_notify();
        }
    }

    /// Returns true if the handshake is complete.
    pub(super) fn is_established(&self) -> bool {
        match self {
            SecurityLayer::Plain => true,
            SecurityLayer::Tls(tls) => !tls.is_handshaking(),
        }
    }

    /// Returns the peer's certificates; `None` without TLS.
    pub(super) fn chain(&self) -> Option<&[CertificateDer<'static>]> {
        match self {
            SecurityLayer::Plain => None,
            SecurityLayer::Tls(tls) => Some(tls.peer_certificates().unwrap_or_default()),
        }
    }
}

fn read_outcome(read: io::Result<usize>) -> io::Result<ReadOutcome> {
    match read {
        Ok(0) => Ok(ReadOutcome::End),
        Ok(length) => Ok(ReadOutcome::Bytes(length)),
        Err(error) if is_temporary(&error) => Ok(ReadOutcome::Pending),
        Err(error) => Err(error),
    }
}

fn zero_if_would_block(written: io::Result<usize>) -> io::Result<usize> {
    match written {
        Err(error) if is_temporary(&error) => Ok(0),
        other => other,
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
