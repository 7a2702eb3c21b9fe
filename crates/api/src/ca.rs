//! The group's own certificate authority: a directory of files, all mode 0600.
//!
//! | file | content |
//! | --- | --- |
//! | `ca.pem`, `ca.key` | the authority's certificate and private key |
//! | `ca.crl` | its revocation list, empty at first |
//! | `serials.log` | a line for each certificate issued or revoked |
//! | `NODE.pem`, `NODE.key` | a node's certificate and private key |
//!
//! Keys are ECDSA on P-256. A node's certificate carries its identity as the DNS name [`node_dns_name`] and is valid at
//! both ends of a TLS connection. No file is ever overwritten except the revocation list, which is replaced as a whole.
//!
//! A node that makes its key itself sends a [`CertificateRequest`], and [`CertificateAuthority::sign`] answers it.

mod certificate_request;
mod pem;

pub use certificate_request::{
    CertificateRequest, NodeKey, REQUEST_BYTES_MAX, RequestError, SignedRequest,
};
pub use pem::{certificate_to_pem, revocation_list_to_pem};

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData,
    RevocationReason, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const AUTHORITY_DAYS: u32 = 3650;

/// Default validity of a node's certificate, in days.
pub const NODE_DAYS: u32 = 825;

/// Default validity of a certificate that the daemon signs for a node and renews, in days.
pub const RENEWED_DAYS: u32 = 90;

/// Maximum lag of a node's clock behind the authority's.
const CLOCK_TOLERANCE: Duration = DAY;

/// Returns the DNS name of node `name` in its certificate: `NAME.node`.
pub fn node_dns_name(name: &str) -> String {
    format!("{name}.node")
}

/// An error of the certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file exists that must not be overwritten.
    #[error("{} exists already and is not overwritten; move it away or use another directory", .0.display())]
    Exists(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The name is not allowed for a node or group.
    #[error("`{0}` is not a name; use 1 to 40 lower-case letters, digits and inner hyphens")]
    Name(String),
    /// The node has no valid certificate to revoke.
    #[error("no certificate of `{0}` is in force; serials.log lists what was issued")]
    NotIssued(String),
    /// The node has a valid certificate, so that another host may have the name.
    #[error(
        "a certificate of `{0}` is in force; choose another name, or revoke it first with `holdfast ca revoke {0}`"
    )]
    InForce(String),
    /// A certificate request is refused.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A line of the log is malformed.
    #[error("{}:{line}: not a line of the log; restore the file", .path.display())]
    Log {
        /// The log.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// Creating or reading a certificate failed.
    #[error("certificate: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// Files of a certificate just issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedFiles {
    /// The certificate (PEM).
    pub cert: PathBuf,
    /// The private key (PEM).
    pub key: PathBuf,
    /// The certificate's serial number in hexadecimal.
    pub serial: String,
}

/// A certificate that was signed for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedCertificate {
    /// The certificate in PEM.
    pub pem: String,
    /// The certificate in DER.
    pub der: Vec<u8>,
    /// The serial number in hexadecimal.
    pub serial: String,
}

/// A certificate authority that can issue and revoke certificates.
pub struct CertificateAuthority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl CertificateAuthority {
    /// Creates an authority for the group `group` in `dir`, which is created if necessary.
    ///
    /// # Errors
    /// `dir` holds an authority already, cannot be written, or `group` is not a name.
    pub fn init(dir: &Path, group: &str) -> Result<CertificateAuthority, CaError> {
        check_name(group)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(file_error(dir))?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("Holdfast group {group}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(random_serial()?);
        set_validity(&mut params, AUTHORITY_DAYS);
        let certificate = params.self_signed(&key)?;
        // Create the key first: the process that creates the key is the one that writes the rest.
        create_file(&dir.join("ca.key"), &key.serialize_pem())?;
        create_file(&dir.join("ca.pem"), &certificate.pem())?;
        create_file(&dir.join("serials.log"), "")?;
        let authority = CertificateAuthority {
            dir: dir.to_owned(),
            issuer: Issuer::new(params, key),
        };
        authority.write_crl(&[])?;
        Ok(authority)
    }

    /// Opens the authority in `dir`.
    ///
    /// # Errors
    /// Its files are missing or damaged.
    pub fn open(dir: &Path) -> Result<CertificateAuthority, CaError> {
        let key = KeyPair::from_pem(&read(&dir.join("ca.key"))?)?;
        let certificate = read(&dir.join("ca.pem"))?;
        Ok(CertificateAuthority {
            dir: dir.to_owned(),
            issuer: Issuer::from_ca_cert_pem(&certificate, key)?,
        })
    }

    /// Issues a certificate for node `node`, valid for `days` days; `addresses` are added to its names.
    ///
    /// # Errors
    /// `node` is not a name, or its files exist already (revoke moves them aside).
    pub fn issue(
        &self,
        node: &str,
        addresses: &[IpAddr],
        days: u32,
    ) -> Result<IssuedFiles, CaError> {
        check_name(node)?;
        let key = KeyPair::generate()?;
        let (certificate, serial) = self.certify(node, &key, addresses, days)?;
        let issued = IssuedFiles {
            cert: self.dir.join(format!("{node}.pem")),
            key: self.dir.join(format!("{node}.key")),
            serial,
        };
        if issued.cert.exists() {
            return Err(CaError::Exists(issued.cert));
        }
        create_file(&issued.key, &key.serialize_pem())?;
        // Log before the certificate can be used, so that every used certificate can be revoked.
        self.log_issued(&issued.serial, node, days)?;
        create_file(&issued.cert, &certificate.pem())?;
        Ok(issued)
    }

    /// Signs a certificate for the name and key of `request`, valid for `days` days. The log has it before this function
    /// returns. Whether the name is free is the caller's question ([`CertificateAuthority::check_free`]).
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn sign(
        &self,
        request: &CertificateRequest,
        days: u32,
    ) -> Result<SignedCertificate, CaError> {
        let (certificate, serial) = self.certify(request.name(), &request.public_key, &[], days)?;
        self.log_issued(&serial, request.name(), days)?;
        Ok(SignedCertificate {
            pem: certificate.pem(),
            der: certificate.der().to_vec(),
            serial,
        })
    }

    /// Checks that no certificate of `node` is in force.
    ///
    /// # Errors
    /// [`CaError::InForce`], or the log cannot be read.
    pub fn check_free(&self, node: &str) -> Result<(), CaError> {
        check_name(node)?;
        let log = self.read_log()?;
        match in_force(&log, node).next() {
            Some(_) => Err(CaError::InForce(node.to_owned())),
            None => Ok(()),
        }
    }

    /// Returns the authority's certificate in PEM.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn certificate_pem(&self) -> Result<String, CaError> {
        read(&self.dir.join("ca.pem"))
    }

    /// Returns the revocation list in PEM.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn revocations_pem(&self) -> Result<String, CaError> {
        read(&self.dir.join("ca.crl"))
    }

    /// Makes a certificate with a new serial number.
    fn certify(
        &self,
        node: &str,
        key: &impl PublicKeyData,
        addresses: &[IpAddr],
        days: u32,
    ) -> Result<(Certificate, String), CaError> {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("node:{node}"));
        let dns_name = Ia5String::try_from(node_dns_name(node))?;
        params.subject_alt_names = vec![SanType::DnsName(dns_name)];
        let ips = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names.extend(ips);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        let serial = random_serial()?;
        let serial_text = hex(&serial.to_bytes());
        params.serial_number = Some(serial);
        set_validity(&mut params, days);
        Ok((params.signed_by(key, &self.issuer)?, serial_text))
    }

    /// Revokes every valid certificate of `node`: the revocation list is replaced, and the node's files are renamed
    /// (`NODE.revoked-SERIAL.pem`, `.key`) if this directory has them. Returns the serial numbers.
    ///
    /// # Errors
    /// No certificate of `node` is valid, or a file cannot be written.
    pub fn revoke(&self, node: &str) -> Result<Vec<String>, CaError> {
        check_name(node)?;
        let log = self.read_log()?;
        let serials: Vec<String> = in_force(&log, node)
            .map(|entry| entry.serial.clone())
            .collect();
        let Some(last) = serials.last() else {
            return Err(CaError::NotIssued(node.to_owned()));
        };
        for serial in &serials {
            self.log_revoked(serial, node)?;
        }
        self.write_crl(&self.read_log()?)?;
        for extension in ["pem", "key"] {
            let from = self.dir.join(format!("{node}.{extension}"));
            let to = self.dir.join(format!("{node}.revoked-{last}.{extension}"));
            match fs::rename(&from, &to) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(file_error(&from)(error));
                }
                _ => {}
            }
        }
        Ok(serials)
    }

    /// Replaces the revocation list by one with all revocations in `log`.
    fn write_crl(&self, log: &[LogEntry]) -> Result<(), CaError> {
        let revocations: Vec<&LogEntry> = log.iter().filter(|entry| entry.is_revocation).collect();
        // A certificate that has ended is refused anyway.
        let is_listed = |entry: &&&LogEntry| {
            let issued = log.iter().find(|other| other.serial == entry.serial);
            !issued.is_some_and(LogEntry::has_ended)
        };
        let revoked: Vec<RevokedCertParams> = revocations
            .iter()
            .filter(is_listed)
            .map(|entry| RevokedCertParams {
                serial_number: SerialNumber::from_slice(&entry.serial_bytes),
                revocation_time: date_time_ymd(1970, 1, 1) + entry.time,
                reason_code: Some(RevocationReason::Unspecified),
                invalidity_date: None,
            })
            .collect();
        let now = since_epoch();
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(1970, 1, 1) + now.saturating_sub(CLOCK_TOLERANCE),
            next_update: date_time_ymd(1970, 1, 1) + now + DAY * AUTHORITY_DAYS,
            crl_number: SerialNumber::from_slice(&(1 + revocations.len() as u64).to_be_bytes()),
            issuing_distribution_point: None,
            revoked_certs: revoked,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.dir.join("ca.crl");
        let partial = self.dir.join("ca.crl.partial");
        let pem = params.signed_by(&self.issuer)?.pem()?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&partial).and_then(|mut file| {
            file.write_all(pem.as_bytes())?;
            file.sync_all()
        });
        written
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(file_error(&path))
    }

    fn log_issued(&self, serial: &str, node: &str, days: u32) -> Result<(), CaError> {
        let now = since_epoch();
        let end = now + DAY * days;
        self.append_log(&format!(
            "issued {serial} {node} {} {}\n",
            now.as_secs(),
            end.as_secs()
        ))
    }

    fn log_revoked(&self, serial: &str, node: &str) -> Result<(), CaError> {
        let now = since_epoch().as_secs();
        self.append_log(&format!("revoked {serial} {node} {now}\n"))
    }

    fn append_log(&self, line: &str) -> Result<(), CaError> {
        let path = self.dir.join("serials.log");
        OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| {
                file.write_all(line.as_bytes())?;
                file.sync_all()
            })
            .map_err(file_error(&path))
    }

    fn read_log(&self) -> Result<Vec<LogEntry>, CaError> {
        let path = self.dir.join("serials.log");
        let text = read(&path)?;
        let parse = |(number, line)| {
            LogEntry::parse(line).ok_or_else(|| CaError::Log {
                path: path.clone(),
                line: number + 1,
            })
        };
        text.lines().enumerate().map(parse).collect()
    }
}

/// A line of the log: `issued SERIAL NODE SECONDS END_SECONDS` (earlier releases wrote no end) or `revoked SERIAL NODE
/// SECONDS`. Times count from 1970.
struct LogEntry {
    is_revocation: bool,
    serial: String,
    serial_bytes: Vec<u8>,
    node: String,
    time: Duration,
    end: Option<Duration>,
}

/// Returns the certificates of `node` that have not ended and are not revoked, in the order of the log.
fn in_force<'log>(log: &'log [LogEntry], node: &str) -> impl Iterator<Item = &'log LogEntry> {
    log.iter().filter(move |entry| {
        let is_revoked =
            || (log.iter()).any(|other| other.is_revocation && other.serial == entry.serial);
        entry.node == node && !entry.is_revocation && !entry.has_ended() && !is_revoked()
    })
}

impl LogEntry {
    fn parse(line: &str) -> Option<LogEntry> {
        let mut fields = line.split(' ');
        let is_revocation = match fields.next()? {
            "issued" => false,
            "revoked" => true,
            _ => return None,
        };
        let serial = fields.next()?.to_owned();
        let entry = LogEntry {
            is_revocation,
            serial_bytes: unhex(&serial)?,
            serial,
            node: fields.next()?.to_owned(),
            time: Duration::from_secs(fields.next()?.parse().ok()?),
            end: match fields.next() {
                Some(end) if !is_revocation => Some(Duration::from_secs(end.parse().ok()?)),
                Some(_) => return None,
                None => None,
            },
        };
        fields.next().is_none().then_some(entry)
    }

    /// Returns true if the certificate has ended for every clock within the tolerance.
    fn has_ended(&self) -> bool {
        self.end
            .is_some_and(|end| end + CLOCK_TOLERANCE < since_epoch())
    }
}

/// Returns a random serial number, positive and of fixed length (RFC 5280, 4.1.2.2).
fn random_serial() -> Result<SerialNumber, CaError> {
    let mut bytes = [0; 16];
    random_bytes(&mut bytes).map_err(file_error(Path::new(RANDOM_DEVICE)))?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

const RANDOM_DEVICE: &str = "/dev/urandom";

/// Fills `bytes` with random numbers of the system.
pub(crate) fn random_bytes(bytes: &mut [u8]) -> io::Result<()> {
    File::open(RANDOM_DEVICE)?.read_exact(bytes)
}

fn set_validity(params: &mut CertificateParams, days: u32) {
    let now = date_time_ymd(1970, 1, 1) + since_epoch();
    params.not_before = now - CLOCK_TOLERANCE;
    params.not_after = now + DAY * days;
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Checks that a name is one label of a domain name (the daemon's configuration has the same rule).
///
/// # Errors
/// [`CaError::Name`].
pub fn check_name(name: &str) -> Result<(), CaError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let outside = name.starts_with('-') || name.ends_with('-');
    // A node named `ca` would collide with the authority's files.
    if name.is_empty() || name.len() > 40 || !name.chars().all(allowed) || outside || name == "ca" {
        return Err(CaError::Name(name.to_owned()));
    }
    Ok(())
}

/// Writes a new file of mode 0600 and makes it durable.
fn create_file(path: &Path, content: &str) -> Result<(), CaError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file: File = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CaError::Exists(path.to_owned()),
        _ => file_error(path)(error),
    })?;
    file.write_all(content.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(file_error(path))
}

fn read(path: &Path) -> Result<String, CaError> {
    fs::read_to_string(path).map_err(file_error(path))
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> CaError {
    let path = path.to_owned();
    move |source| CaError::File {
        path: path.clone(),
        source,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok())
        .collect()
}
