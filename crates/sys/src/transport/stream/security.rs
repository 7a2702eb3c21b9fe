//! TLS of connections: the provider of TLS sessions, and the layer between a socket and its plain data.

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::fmt::Debug;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;

/// Provider of certificates and admission rules.
pub trait Security: Send + Sync + Debug {
    /// Makes the TLS session of an outgoing connection.
    ///
    /// # Errors
    /// Errors of the TLS library.
    fn dial(&self) -> Result<ClientConnection, rustls::Error>;

    /// Makes the TLS session of an incoming connection.
    ///
    /// # Errors
    /// Errors of the TLS library.
    fn accept(&self) -> Result<ServerConnection, rustls::Error>;

    /// Returns the name of the peer with this certificate chain (its own certificate first). Called after the
    /// handshake, and again when the security has changed.
    ///
    /// # Errors
    /// The reason that the peer is not admitted.
    fn name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String>;
}

/// Layer above the socket.
pub(super) enum Layer {
    Plain,
    Tls(Box<Connection>),
}

/// Result of a read.
pub(super) enum Found {
    Bytes(usize),
    /// No more data is available at present.
    Nothing,
    /// The other side has finished sending.
    End,
}

impl Layer {
    /// Reads decrypted data that is buffered into `buffer`; if there is none and `may` is set, reads once from the
    /// socket.
    pub(super) fn read(
        &mut self,
        socket: &mut TcpStream,
        buffer: &mut [u8],
        may: bool,
    ) -> io::Result<Found> {
        let Layer::Tls(tls) = self else {
            return match may {
                true => found(socket.read(buffer)),
                false => Ok(Found::Nothing),
            };
        };
        match found(tls.reader().read(buffer))? {
            Found::Nothing if may => {}
            other => return Ok(other),
        }
        match found(tls.read_tls(socket))? {
            Found::Nothing => return Ok(Found::Nothing),
            Found::End => {
                return match tls.reader().read(buffer) {
                    // An end of the socket without a TLS close may be forged by anyone; the reader reports it as an
                    // error.
                    Ok(0) => Ok(Found::End),
                    Ok(length) => Ok(Found::Bytes(length)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        Err(io::ErrorKind::UnexpectedEof.into())
                    }
                    Err(error) => Err(error),
                };
            }
            Found::Bytes(_) => {}
        }
        if let Err(error) = tls.process_new_packets() {
            // The alert tells the other side the reason, if the socket has buffer space.
            let _ = tls.write_tls(socket);
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                error.to_string(),
            ));
        }
        match found(tls.reader().read(buffer))? {
            // The record had no content for the application, such as a handshake record.
            Found::Nothing => Ok(Found::Bytes(0)),
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
        let Layer::Tls(tls) = self else {
            let wrote = match out.iter().all(|slice| slice.is_empty()) {
                true => Ok(0),
                false => socket.write_vectored(out),
            };
            return Ok((none_for_now(wrote)?, false));
        };
        let taken = match tls.is_handshaking() {
            true => 0,
            false => tls.writer().write_vectored(out)?,
        };
        while tls.wants_write() {
            if none_for_now(tls.write_tls(socket))? == 0 {
                return Ok((taken, true));
            }
        }
        Ok((taken, false))
    }

    /// Sends the TLS close notification.
    pub(super) fn finish(&mut self) {
        if let Layer::Tls(tls) = self {
            tls.send_close_notify();
        }
    }

    /// Returns true if the handshake is complete.
    pub(super) fn is_made(&self) -> bool {
        match self {
            Layer::Plain => true,
            Layer::Tls(tls) => !tls.is_handshaking(),
        }
    }

    /// Returns the peer's certificates; `None` without TLS.
    pub(super) fn chain(&self) -> Option<&[CertificateDer<'static>]> {
        match self {
            Layer::Plain => None,
            Layer::Tls(tls) => Some(tls.peer_certificates().unwrap_or_default()),
        }
    }
}

fn found(read: io::Result<usize>) -> io::Result<Found> {
    match read {
        Ok(0) => Ok(Found::End),
        Ok(length) => Ok(Found::Bytes(length)),
        Err(error) if is_for_now(&error) => Ok(Found::Nothing),
        Err(error) => Err(error),
    }
}

fn none_for_now(written: io::Result<usize>) -> io::Result<usize> {
    match written {
        Err(error) if is_for_now(&error) => Ok(0),
        other => other,
    }
}

fn is_for_now(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
