//! Arithmetic: whole numbers exactly as long as they fit, everything else as doubles.

/// Letters of an expression at most.
const LONGEST: usize = 1000;
/// Parentheses, signs and powers within each other at most.
const DEEPEST: usize = 64;

/// Computes an expression.
pub(crate) fn compute(expression: &str) -> Result<String, String> {
    if expression.len() > LONGEST {
        return Err(format!("the expression has {} bytes, at most {LONGEST} are taken", expression.len()));
    }
    let mut parser = Parser { text: expression.as_bytes(), at: 0, depth: 0 };
    let number = parser.sum()?;
    parser.skip();
    if parser.at < parser.text.len() {
        return Err(parser.wrong("an operator"));
    }
    match number {
        Number::Whole(n) => Ok(n.to_string()),
        Number::Real(x) if x.is_finite() => Ok(x.to_string()),
        Number::Real(_) => Err("the result is no number: too large, or not defined".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Number {
    Whole(i128),
    Real(f64),
}

impl Number {
    fn real(self) -> f64 {
        match self {
            Number::Whole(n) => n as f64,
            Number::Real(x) => x,
        }
    }

    /// A whole number where both are and the result fits, else a real one.
    fn with(self, other: Number, whole: impl Fn(i128, i128) -> Option<i128>, real: impl Fn(f64, f64) -> f64) -> Number {
        let exact = match (self, other) {
            (Number::Whole(a), Number::Whole(b)) => whole(a, b),
            _ => None,
        };
        exact.map_or_else(|| Number::Real(real(self.real(), other.real())), Number::Whole)
    }

    /// A real number that is whole and small enough to be exact becomes one.
    fn tidy(x: f64) -> Number {
        const EXACT: f64 = 9_007_199_254_740_992.0;
        if x.fract() == 0.0 && x.abs() < EXACT { Number::Whole(x as i128) } else { Number::Real(x) }
    }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn skip(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    /// Takes a sign, if it is next.
    fn takes(&mut self, sign: &str) -> bool {
        self.skip();
        let is_next = self.text[self.at..].starts_with(sign.as_bytes());
        self.at += if is_next { sign.len() } else { 0 };
        is_next
    }

    fn wrong(&self, wanted: &str) -> String {
        let rest = String::from_utf8_lossy(&self.text[self.at..]);
        let found = if rest.is_empty() {
            "the end".to_owned()
        } else {
            format!("{:?}", kiln_system::text::shown_within(&rest, 12))
        };
        format!("{wanted} is missing before {found}")
    }

    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(format!("the expression is nested more than {DEEPEST} deep"));
        }
        let done = work(self);
        self.depth -= 1;
        done
    }

    fn sum(&mut self) -> Result<Number, String> {
        let mut left = self.product()?;
        loop {
            if self.takes("+") {
                left = left.with(self.product()?, i128::checked_add, |a, b| a + b);
            } else if self.takes("-") {
                left = left.with(self.product()?, i128::checked_sub, |a, b| a - b);
            } else {
                return Ok(left);
            }
        }
    }

    fn product(&mut self) -> Result<Number, String> {
        let mut left = self.signed()?;
        loop {
            self.skip();
            // Two stars are a power.
            if !self.text[self.at..].starts_with(b"**") && (self.takes("*") || self.takes("×")) {
                left = left.with(self.signed()?, i128::checked_mul, |a, b| a * b);
            } else if self.takes("/") || self.takes("÷") {
                let right = self.signed()?;
                if right.real() == 0.0 {
                    return Err("a division by zero".to_owned());
                }
                let exact =
                    |a: i128, b: i128| a.checked_rem(b).filter(|rest| *rest == 0).and_then(|_| a.checked_div(b));
                left = left.with(right, exact, |a, b| a / b);
            } else if self.takes("%") {
                let right = self.signed()?;
                if right.real() == 0.0 {
                    return Err("a remainder of a division by zero".to_owned());
                }
                left = left.with(right, i128::checked_rem_euclid, f64::rem_euclid);
            } else {
                return Ok(left);
            }
        }
    }

    fn signed(&mut self) -> Result<Number, String> {
        if self.takes("-") {
            let number = self.deeper(Self::signed)?;
            return Ok(Number::Whole(0).with(number, i128::checked_sub, |a, b| a - b));
        }
        if self.takes("+") {
            return self.deeper(Self::signed);
        }
        self.power()
    }

    fn power(&mut self) -> Result<Number, String> {
        let base = self.atom()?;
        if !(self.takes("^") || self.takes("**")) {
            return Ok(base);
        }
        // 2^3^2 is 2^9, and 2^-1 a half.
        let exponent = self.deeper(Self::signed)?;
        let whole = |a: i128, b: i128| u32::try_from(b).ok().and_then(|b| a.checked_pow(b));
        Ok(base.with(exponent, whole, f64::powf))
    }

    fn atom(&mut self) -> Result<Number, String> {
        if self.takes("(") {
            let inside = self.deeper(Self::sum)?;
            return if self.takes(")") { Ok(inside) } else { Err(self.wrong("`)`")) };
        }
        self.skip();
        match self.text.get(self.at) {
            Some(b'0'..=b'9' | b'.') => self.number(),
            Some(letter) if letter.is_ascii_alphabetic() => self.named(),
            _ => Err(self.wrong("a number")),
        }
    }

    fn number(&mut self) -> Result<Number, String> {
        let start = self.at;
        let digits = |parser: &mut Self| {
            while parser.text.get(parser.at).is_some_and(|c| c.is_ascii_digit() || *c == b'_') {
                parser.at += 1;
            }
        };
        digits(self);
        let mut is_whole = true;
        if self.text.get(self.at) == Some(&b'.') {
            (is_whole, self.at) = (false, self.at + 1);
            digits(self);
        }
        if let Some(b'e' | b'E') = self.text.get(self.at) {
            let sign = usize::from(matches!(self.text.get(self.at + 1), Some(b'+' | b'-')));
            if self.text.get(self.at + 1 + sign).is_some_and(u8::is_ascii_digit) {
                (is_whole, self.at) = (false, self.at + 1 + sign);
                digits(self);
            }
        }
        let text: String = self.text[start..self.at].iter().filter(|c| **c != b'_').map(|c| char::from(*c)).collect();
        let exact = text.parse().ok().filter(|_| is_whole).map(Number::Whole);
        let number = exact.or_else(|| text.parse().ok().map(Number::Real));
        number.ok_or_else(|| format!("{text:?} is no number"))
    }

    /// A constant, or a function with what it is of.
    fn named(&mut self) -> Result<Number, String> {
        let start = self.at;
        while self.text.get(self.at).is_some_and(u8::is_ascii_alphanumeric) {
            self.at += 1;
        }
        let name = String::from_utf8_lossy(&self.text[start..self.at]).to_ascii_lowercase();
        match name.as_str() {
            "pi" => return Ok(Number::Real(std::f64::consts::PI)),
            "e" => return Ok(Number::Real(std::f64::consts::E)),
            _ => {}
        }
        if !self.takes("(") {
            return Err(format!("there is no constant {name:?}"));
        }
        let mut of = vec![self.deeper(Self::sum)?];
        while self.takes(",") {
            of.push(self.deeper(Self::sum)?);
        }
        if !self.takes(")") {
            return Err(self.wrong("`)`"));
        }
        apply(&name, &of)
    }
}

fn apply(name: &str, of: &[Number]) -> Result<Number, String> {
    if let ("min" | "max", [first, rest @ ..]) = (name, of) {
        let better = |best: Number, next: Number| match (name == "min") == (next.real() < best.real()) {
            true => next,
            false => best,
        };
        return Ok(rest.iter().fold(*first, |best, next| better(best, *next)));
    }
    let [number] = of else { return Err(format!("{name} takes one number, not {}", of.len())) };
    if let (Number::Whole(n), "abs" | "floor" | "ceil" | "round") = (*number, name) {
        return Ok(Number::Whole(if name == "abs" { n.saturating_abs() } else { n }));
    }
    let x = number.real();
    Ok(Number::tidy(match name {
        "sqrt" => x.sqrt(),
        "abs" => x.abs(),
        "exp" => x.exp(),
        "ln" => x.ln(),
        "log10" | "log" => x.log10(),
        "log2" => x.log2(),
        "sin" => x.sin(),
        "cos" => x.cos(),
        "tan" => x.tan(),
        "asin" => x.asin(),
        "acos" => x.acos(),
        "atan" => x.atan(),
        "floor" => x.floor(),
        "ceil" => x.ceil(),
        "round" => x.round(),
        _ => return Err(format!("there is no function {name:?}")),
    }))
}

#[cfg(test)]
mod tests {
    use super::compute;

    #[test]
    fn expressions_have_the_values_that_people_expect() {
        for (text, want) in [
            ("1 + 2 * 3", "7"),
            ("(1 + 2) * 3", "9"),
            ("2^3^2", "512"),
            ("2**10", "1024"),
            ("-2^2", "-4"),
            ("2^-1", "0.5"),
            ("7 / 2", "3.5"),
            ("6 / 2", "3"),
            ("-7 % 3", "2"),
            ("12345678901234567890 * 9876543210987654321", "121932631137021795223746380111126352690"),
            ("0.1 + 0.2", "0.30000000000000004"),
            ("1_000_000 * 3", "3000000"),
            ("sqrt(16) + max(1, 5, 3)", "9"),
            ("min(2, -1) + abs(-3)", "2"),
            ("round(2.5) + floor(2.9) + ceil(2.1)", "8"),
            ("2 × 3 ÷ 4", "1.5"),
            ("1e3 + .5", "1000.5"),
            ("2e", "error"),
            ("log10(1000)", "3"),
        ] {
            let got = compute(text);
            match want {
                "error" => assert!(got.is_err(), "{text}: {got:?}"),
                want => assert_eq!(got.as_deref(), Ok(want), "{text}"),
            }
        }
        assert!(compute("sin(pi / 6)").unwrap().starts_with("0.49999999999999"));
    }

    #[test]
    fn what_has_no_value_says_why() {
        for (text, word) in [
            ("", "a number is missing before the end"),
            ("1 +", "a number is missing"),
            ("1 2", "an operator is missing before \"2\""),
            ("(1", "`)` is missing"),
            ("1 / 0", "division by zero"),
            ("1 % 0", "division by zero"),
            ("foo(1)", "no function \"foo\""),
            ("bar", "no constant \"bar\""),
            ("sqrt(1, 2)", "one number, not 2"),
            ("sqrt(-1)", "no number"),
            ("10^400 * 10.0^400", "no number"),
            ("\u{1b}[2J", "a number is missing"),
        ] {
            let why = compute(text).unwrap_err();
            assert!(why.contains(word) && !why.contains('\u{1b}'), "{text}: {why}");
        }
        assert!(compute(&"(".repeat(900)).unwrap_err().contains("nested"));
        assert!(compute(&"-".repeat(900)).unwrap_err().contains("nested"));
        assert!(compute(&"1+".repeat(2000)).unwrap_err().contains("4000 bytes"));
        assert_eq!(compute("abs(-(2^126))").as_deref(), Ok("85070591730234615865843651857942052864"));
    }
}
