"""A task with exact answers: capitals of countries that the instructions do not mention.

``compute_score`` is a reward function (``recipe_gkd evaluate --reward examples/smollm2/capitals.py``).
"""

from __future__ import annotations

CAPITALS = {
    "Afghanistan": "Kabul", "Albania": "Tirana", "Algeria": "Algiers", "Angola": "Luanda", "Armenia": "Yerevan",
    "Azerbaijan": "Baku", "Bangladesh": "Dhaka", "Belgium": "Brussels", "Bolivia": "La Paz", "Bulgaria": "Sofia",
    "Cambodia": "Phnom Penh", "Cameroon": "Yaounde", "Colombia": "Bogota", "Costa Rica": "San Jose",
    "Croatia": "Zagreb", "Cyprus": "Nicosia", "Czechia": "Prague", "Ecuador": "Quito", "Estonia": "Tallinn",
    "Georgia": "Tbilisi", "Ghana": "Accra", "Honduras": "Tegucigalpa", "Iran": "Tehran", "Iraq": "Baghdad",
    "Jamaica": "Kingston", "Jordan": "Amman", "Kazakhstan": "Astana", "Latvia": "Riga", "Lebanon": "Beirut",
    "Libya": "Tripoli", "Lithuania": "Vilnius", "Malaysia": "Kuala Lumpur", "Malta": "Valletta",
    "Mongolia": "Ulaanbaatar", "Mozambique": "Maputo", "New Zealand": "Wellington", "Nicaragua": "Managua",
    "North Korea": "Pyongyang", "Pakistan": "Islamabad", "Paraguay": "Asuncion", "Qatar": "Doha",
    "Romania": "Bucharest", "Russia": "Moscow", "Saudi Arabia": "Riyadh", "Senegal": "Dakar", "Serbia": "Belgrade",
    "Slovakia": "Bratislava", "Slovenia": "Ljubljana", "Somalia": "Mogadishu", "Sudan": "Khartoum",
    "Sweden": "Stockholm", "Switzerland": "Bern", "Syria": "Damascus", "Taiwan": "Taipei", "Tunisia": "Tunis",
    "Uganda": "Kampala", "Ukraine": "Kyiv", "Uruguay": "Montevideo", "Venezuela": "Caracas", "Zimbabwe": "Harare",
}  # fmt: skip
OTHER_SPELLINGS = {"Bogotá": "Bogota", "San José": "San Jose", "Yaoundé": "Yaounde", "Asunción": "Asuncion"}


def questions() -> list[tuple[str, str]]:
    """Return every question with the name that its answer must contain."""
    return [(f"What is the capital of {country}?", capital) for country, capital in CAPITALS.items()]


def compute_score(response: str, ground_truth: str) -> float:
    """Return 1.0 if the response contains the name of the capital, else 0.0."""
    for other, name in OTHER_SPELLINGS.items():
        response = response.replace(other, name)
    return float(ground_truth in response)
