//! Requests of clients to a server, and its expected answers, to the byte.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use holdfast_testbed::connection_load::{MESSAGE_BYTES, fill_message};

/// Protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerProtocol {
    /// The server sends every byte back.
    Echo,
    /// The server answers a GET with the requested path.
    Http,
    /// PostgreSQL's protocol, version 3, without a password.
    Postgresql,
}

/// A connection to a server.
#[derive(Debug)]
pub struct ProtocolConnection {
    stream: TcpStream,
    protocol: ServerProtocol,
    /// Bytes that were received and not processed yet.
    input: Vec<u8>,
}

/// Number of bytes that differed from the expected ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrongBytes(pub u64);

impl ProtocolConnection {
    /// Connects, and performs the protocol's start. Any wait longer than `timeout` counts as hung.
    ///
    /// # Errors
    /// connect(2), read(2) or write(2) fails, or an answer is invalid.
    pub fn open(
        address: SocketAddr,
        protocol: ServerProtocol,
        timeout: Duration,
    ) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let mut opened = Self {
            stream,
            protocol,
            input: Vec::new(),
        };
        if protocol == ServerProtocol::Postgresql {
            opened.stream.write_all(&postgresql_startup())?;
            opened.read_until_ready()?;
        }
        Ok(opened)
    }

    /// Sends a unique request and compares the answer.
    ///
    /// # Errors
    /// As [`ProtocolConnection::open`].
    pub fn exchange(&mut self, number: u64, turn: u64) -> io::Result<WrongBytes> {
        match self.protocol {
            ServerProtocol::Echo => {
                let mut message = [0; MESSAGE_BYTES];
                fill_message(&mut message, number, turn);
                self.stream.write_all(&message)?;
                let answer = self.read_exactly(MESSAGE_BYTES)?;
                Ok(count_wrong_bytes(&message, &answer))
            }
            ServerProtocol::Http => {
                let path = unique_text(number, turn);
                let request = format!("GET {path} HTTP/1.1\r\nHost: lab\r\n\r\n");
                self.stream.write_all(request.as_bytes())?;
                let body = self.read_http_body()?;
                Ok(count_wrong_bytes(path.as_bytes(), &body))
            }
            ServerProtocol::Postgresql => {
                let word = unique_text(number, turn);
                let query = format!("SELECT '{word}'\0");
                self.stream
                    .write_all(&postgresql_message(b'Q', query.as_bytes()))?;
                let row = self.read_until_ready()?;
                // A row begins with the number of columns (2 bytes) and the length of the first column (4 bytes).
                let value = row.get(6..).unwrap_or_default();
                Ok(count_wrong_bytes(word.as_bytes(), value))
            }
        }
    }

    /// Ends the connection as the protocol demands.
    ///
    /// # Errors
    /// write(2) fails.
    pub fn close(mut self) -> io::Result<()> {
        if self.protocol == ServerProtocol::Postgresql {
            self.stream.write_all(&postgresql_message(b'X', &[]))?;
        }
        Ok(())
    }

    /// Returns the address of the client's end.
    ///
    /// # Errors
    /// getsockname(2) fails.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Reads to the end of an answer of PostgreSQL; returns its last row.
    fn read_until_ready(&mut self) -> io::Result<Vec<u8>> {
        let mut row = Vec::new();
        loop {
            let head = self.read_exactly(5)?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let rest = self.read_exactly(length.saturating_sub(4).min(1 << 20))?;
            match head[0] {
                b'Z' => return Ok(row),
                b'D' => row = rest,
                b'E' => return Err(protocol_error(&String::from_utf8_lossy(&rest))),
                _ => {}
            }
        }
    }

    fn read_http_body(&mut self) -> io::Result<Vec<u8>> {
        let end = loop {
            if let Some(at) = self.input.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break at + 4;
            }
            self.read_more()?;
        };
        let head = String::from_utf8_lossy(&self.read_exactly(end)?).into_owned();
        if !head.starts_with("HTTP/1.1 200 ") {
            return Err(protocol_error(head.lines().next().unwrap_or_default()));
        }
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_content_length = name.eq_ignore_ascii_case("content-length");
            is_content_length
                .then(|| value.trim().parse().ok())
                .flatten()
        });
        self.read_exactly(length.ok_or_else(|| protocol_error("no Content-Length"))?)
    }

    fn read_exactly(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.input.len() < count {
            self.read_more()?;
        }
        let rest = self.input.split_off(count);
        Ok(std::mem::replace(&mut self.input, rest))
    }

    fn read_more(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let length = self.stream.read(&mut bytes)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.input.extend_from_slice(&bytes[..length]);
        Ok(())
    }
}

/// Returns a unique text, used as a path and as a word.
fn unique_text(number: u64, turn: u64) -> String {
    format!(
        "/{number}/{turn}/{:016x}",
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ turn
    )
}

fn count_wrong_bytes(expected: &[u8], answer: &[u8]) -> WrongBytes {
    let differ = expected.iter().zip(answer).filter(|(a, b)| a != b).count();
    WrongBytes((differ + expected.len().abs_diff(answer.len())) as u64)
}

fn protocol_error(what: &str) -> io::Error {
    io::Error::other(format!("unexpected answer: {what}"))
}

/// Returns a message of PostgreSQL's protocol.
fn postgresql_message(kind: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len() as u32 + 4;
    [&[kind][..], &length.to_be_bytes(), content].concat()
}

fn postgresql_startup() -> Vec<u8> {
    let words = b"user\0postgres\0database\0postgres\0\0";
    let length = words.len() as u32 + 8;
    [
        &length.to_be_bytes()[..],
        &(3u32 << 16).to_be_bytes(),
        words,
    ]
    .concat()
}
