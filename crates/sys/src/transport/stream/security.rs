//! TLS of streams: who makes it, and the layer between a socket and what is read and written.

use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::fmt::Debug;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;

/// Where certificates come from, and whom they admit.
pub trait Security: Send + Sync + Debug {
    /// TLS of a connection that is made here.
    ///
    /// # Errors
    /// What the library says.
    fn dial(&self) -> Result<ClientConnection, rustls::Error>;

    /// TLS of a connection that is made by the other side.
    ///
    /// # Errors
    /// What the library says.
    fn accept(&self) -> Result<ServerConnection, rustls::Error>;

    /// Whose certificates these are, the first its own; asked after the handshake, and again when the security has changed.
    ///
    /// # Errors
    /// They admit to nothing: why.
    fn name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String>;
}

/// What is above the socket.
pub(super) enum Layer {
    Plain,
    Tls(Box<Connection>),
}

/// What a read found.
pub(super) enum Found {
    Bytes(usize),
    /// For now there is no more.
    Nothing,
    /// The other side has finished.
    End,
}

impl Layer {
    /// Reads into `buffer` what is here already, else, if it `may`, once from the socket.
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
                    // The socket's end without TLS' own may be anybody's doing: the reader says so.
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
            // The other side is told why, if the socket takes it.
            let _ = tls.write_tls(socket);
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                error.to_string(),
            ));
        }
        match found(tls.reader().read(buffer))? {
            // A record without content for us: the handshake's.
            Found::Nothing => Ok(Found::Bytes(0)),
            other => Ok(other),
        }
    }

    /// Writes as much of `out` as the socket takes; returns how much that is, and whether something of TLS' own is left.
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

    /// TLS' last word.
    pub(super) fn finish(&mut self) {
        if let Layer::Tls(tls) = self {
            tls.send_close_notify();
        }
    }

    /// Whether the handshake is over.
    pub(super) fn is_made(&self) -> bool {
        match self {
            Layer::Plain => true,
            Layer::Tls(tls) => !tls.is_handshaking(),
        }
    }

    /// The other side's certificates; none without TLS.
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
